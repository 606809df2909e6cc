"""Resume as a part of `tt.prepare` and of the end of a job."""

from contextlib import suppress
from pathlib import Path

from topotrain.config.job import ConfigError
from topotrain.extensions.checkpointing.checkpoint_reader import FOLDER, Manifest, name_of, numbers
from topotrain.extensions.resume.script_resume import ScriptResume
from topotrain.training.context import Context, PrepareExtension
from topotrain.training.data.script_position import ScriptPosition
from topotrain.training.worker import Worker


class ResumeExtension(PrepareExtension):
    """Continues a script in a fresh process, and a job from its last snapshot."""

    def script_position(self, here: Context, worker: Worker) -> ScriptPosition | None:
        return ScriptResume(here, worker)

    def resume_hint(self, workspace: Path) -> str:
        folder = workspace / FOLDER
        for number in reversed(numbers(folder)):
            with suppress(ConfigError):
                found = Manifest.open(folder / name_of(number))
                how = f"`topotrain run --resume {workspace}` (or the same job with `resume: true`)"
                return f"{how} goes on from snapshot {name_of(number)}, which has step {found.steps(0)}"
        return ""
