"""What travels: every message as a frozen dataclass, and its bytes (`form`).

One number names a message on the wire, for ever. They are told apart by what they are about, in a file for each; who
sends and hears them needs only this room: `from topotrain.core import protocol as m`.
"""

# ruff: noqa: F403 - everything that has no underscore is for everybody
from topotrain.core.protocol.codec import *
from topotrain.core.protocol.session_messages import *
from topotrain.core.protocol.step_messages import *
from topotrain.extensions.elastic.membership_messages import *
from topotrain.extensions.tables.table_messages import *
from topotrain.training.data.data_messages import *
