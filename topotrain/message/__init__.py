"""What travels: every message as a frozen dataclass, and its bytes (`form`).

One number names a message on the wire, for ever. They are told apart by what they are about, in a file for each; who
sends and hears them needs only this room: `from topotrain import message as m`.
"""

# ruff: noqa: F403 - everything that has no underscore is for everybody
from topotrain.message.form import *
from topotrain.message.groups import *
from topotrain.message.members import *
from topotrain.message.states import *
from topotrain.message.steps import *
from topotrain.message.tables import *
