"""Paddle's interface: `tt.init` for trainers, and the command `topotrain pserver`.

See `flags` for the settings, `manual_worker` and `manual_server` for the processes.
"""

import os
from typing import Any

from topotrain.comm.security.secret import load_secret
from topotrain.compat.paddle.flags import COMPARE, Flags, from_environment, from_values
from topotrain.config.job import ConfigError
from topotrain.config.topology import Address, Role
from topotrain.launch.by_hand.manual_server import SharedSettings, serve
from topotrain.launch.by_hand.manual_worker import join
from topotrain.training import context as process


def init(**flags: Any) -> None:
    """Make this process a trainer of a job with manually started pservers.

        tt.init(use_gpu=False, port=7164, ports_num=1, is_local=False, num_of_gradient_servers=2,
                pservers="host1,host2", trainer_id=0)

    This is `paddle.init`, for trainer `trainer_id`. Call it before `tt.prepare`. Flags that are not given are read from
    the environment: PADDLE_INIT_TRAINER_ID is `trainer_id`. With `is_local=True`, the default, it changes nothing.
    Under `topotrain run`, which has placed it already, nothing changes.

    Args:
        flags: see `flags.Flags`; the same names and meanings as for `topotrain pserver`.

    Raises:
        ConfigError: an unknown flag, an invalid value, or flags of a cluster without `is_local`.
    """
    if process.placed():
        from_values(flags)
        return
    found = from_environment(flags, os.environ)
    if found.is_local:
        return
    if process.current() is not None:
        raise ConfigError("tt.init", None, "was called before")
    number = found.trainer_id
    me = Address(Role.WORKER, number, 0) if found.async_sgd else Address(Role.WORKER, 0, number)
    join(found.job(), me, found.store(), load_secret(os.environ), terms=terms_of(found), gpus=found.use_gpu)


def run_pserver(flags: Flags) -> None:
    """Serve as a pserver until the trainers have ended. Raises the errors of `serve`."""
    serve(flags.job(), flags.servers_here(), flags.store(), load_secret(os.environ), terms=terms_of(flags))


def terms_of(flags: Flags) -> SharedSettings:
    """Return the settings that trainers and pservers must share, in Paddle's terms."""
    trainers = flags.num_of_gradient_servers
    apart = (
        f"every trainer needs a trainer_id of its own, from 0 to num_of_gradient_servers - 1; "
        f"this process has trainer_id = {flags.trainer_id} and num_of_gradient_servers = {trainers}"
    )
    return SharedSettings(flags.words, COMPARE, flags.wait_s, flags.name, apart)
