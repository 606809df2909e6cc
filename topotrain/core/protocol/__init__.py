"""Wire messages: every message is a frozen dataclass, with a codec for its bytes.

Each message has a number on the wire that never changes. Modules group messages by topic. Users import all of them from
this package: `from topotrain.core import protocol as m`.
"""

# ruff: noqa: F403 - every name without an underscore is public
from topotrain.core.protocol.codec import *
from topotrain.core.protocol.session_messages import *
from topotrain.core.protocol.step_messages import *
from topotrain.extensions.elastic.membership_messages import *
from topotrain.extensions.tables.table_messages import *
from topotrain.training.data.data_messages import *
