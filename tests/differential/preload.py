"""What a launcher loads. The warm process imports it, so that each launcher that it forks begins with it."""

import pydantic.fields
import pydantic.types

from topotrain.config import job_file
from topotrain.launch import local, multinode
from topotrain.launch.launchers import submission
from topotrain.launch.recovery import resume_point
from topotrain.parallel import split_rules
from topotrain.tools.monitor import job_report, loss_curves, progress_display, result_tables, trace_export
from topotrain.tools.recording import job_recorder

MODULES = (
    *(local, multinode, submission, split_rules, resume_point, job_report, loss_curves, result_tables),
    *(trace_export, progress_display, job_recorder, pydantic),
)
job_file.loads('name: "warm"\ncluster { nworkers_per_group: 2 }\n', "the job")  # the first one takes longest
