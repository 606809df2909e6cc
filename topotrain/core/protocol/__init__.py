"""Wire messages: every message is a frozen dataclass, with a codec for its bytes.

Users import all messages of the core from this package: `from topotrain.core import protocol as m`. The messages of an
extension are imported from the extension's own module.
"""

# ruff: noqa: F403 - every name without an underscore is public
from topotrain.core.protocol.codec import *
from topotrain.core.protocol.message import *
from topotrain.core.protocol.session_messages import *
from topotrain.core.protocol.step_messages import *
