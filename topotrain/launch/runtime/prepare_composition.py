"""The extensions of `tt.prepare`: the only place that names them.

A forkserver imports this module before it forks workers. Each worker would repeat imports inside the function.
"""

from topotrain.extensions.backup_workers.replay_batches import BackupExtension
from topotrain.extensions.resume.resume_extension import ResumeExtension
from topotrain.extensions.tables.frontend.table_extension import TableExtension
from topotrain.parallel.api.prepare_split import SplitExtension
from topotrain.training.context import PrepareExtension


def prepare_extensions() -> tuple[PrepareExtension, ...]:
    """Return the extensions of `tt.prepare`, in the order in which they are called.

    Every `Context` gets new ones.
    """
    return SplitExtension(), TableExtension(), BackupExtension(), ResumeExtension()
