"""The extensions of `tt.prepare`: the only place that names them."""

# Here, and not inside the function: a forkserver imports them once for all workers that it forks.
from topotrain.extensions.assignment.parameter_assignment import AssignmentExtension
from topotrain.extensions.backup_workers.replay_batches import BackupExtension
from topotrain.extensions.drift.drift_check import DriftExtension
from topotrain.extensions.in_place_recovery.repeated_steps import InPlaceExtension
from topotrain.extensions.outer_optimizer.exchange_choices import ExchangeChoices
from topotrain.extensions.outer_optimizer.outer_training import OuterOptimizerExtension
from topotrain.extensions.resume.resume_extension import ResumeExtension
from topotrain.extensions.tables.frontend.table_extension import TableExtension
from topotrain.extensions.worker_values.worker_values import ValueExtension
from topotrain.parallel.api.prepare_split import SplitExtension
from topotrain.training.context import PrepareExtension


def prepare_extensions(choices: ExchangeChoices | None = None) -> tuple[PrepareExtension, ...]:
    """Return new extensions of `tt.prepare`, in the order in which they are called.

    choices: of the worker between two rounds. None: they are neither recorded nor replayed.
    """
    return (
        SplitExtension(),
        TableExtension(),
        OuterOptimizerExtension(choices),
        BackupExtension(),
        InPlaceExtension(),
        AssignmentExtension(),
        DriftExtension(),
        ValueExtension(),
        ResumeExtension(),
    )
