"""TensorFlow's client session: a client outside drives a model on the cluster.

    with tt.Session("tcp://worker7:2222") as session:
        for x, y in loader:
            loss = session.run(train, x, y)

The client's model is a description and the first values. Its computation is recorded (`parallel.remote`) and sent as
plain data. The cluster holds and changes the values, and returns them at the end.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves

from topotrain.comm.security.secret import load_secret
from topotrain.comm.store import StoreError
from topotrain.comm.store.discovery.static_addresses import numeric, split_address
from topotrain.comm.transport import Refused, TransportError
from topotrain.compat.tensorflow.cluster_spec import SCHEMES, without_scheme
from topotrain.compat.tensorflow.session.session_protocol import SessionClosed, SessionConnection, call
from topotrain.config.job import ConfigError
from topotrain.core.client.client import JobError
from topotrain.core.optim.adapter import describe
from topotrain.parallel.program.worker_program import replaced
from topotrain.parallel.remote.argument_codec import CallInput, ReferenceBounds, decode
from topotrain.parallel.remote.graph_recorder import record
from topotrain.parallel.remote.state_numbers import ModelState, TaskCluster
from topotrain.training.rng_state import set_torch_state, torch_state

# Functions with these words draw masks, and need the client's generator: attention has dropout inside.
_DRAWS = ("dropout", "attention", "multi_head")


@dataclass(frozen=True, eq=False, slots=True)
class TrainOp:
    """One step of training, for `Session.run`: see `minimize`."""

    model: nn.Module
    optimizer: Optimizer


def minimize(model: Any, optimizer: Any) -> TrainOp:
    """Make the training step for a model and an optimizer: `optimizer.minimize(loss)`.

    Args:
        model: returns the loss, a tensor with one element.
        optimizer: of torch's own classes, over the model's parameters. Its settings are read at every run, so a
            scheduler works.

    Raises:
        ConfigError: the arguments are not a module and an optimizer.
    """
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        given = f"{type(model).__name__}, {type(optimizer).__name__}"
        raise ConfigError("tt.train.minimize", given, "must be a torch.nn.Module and a torch.optim.Optimizer")
    return TrainOp(model, optimizer)


class Session:
    """A connection to a cluster, and the one model that it computes: `tf.Session`.

    The target computes the modules without a place. The token is that of the cluster (TOPOTRAIN_TOKEN, or its file).

    Args:
        target: a worker's `tt.train.Server.target`, such as "grpc://worker7:2222" ("tcp://worker7:2222" means the
            same). "": this process computes itself.

    Raises:
        ConfigError: no task answers there, or it has another token, or a session already.
    """

    def __init__(self, target: str = "") -> None:
        self._target = target
        self._connection: SessionConnection | None = None
        self._model_state: ModelState | None = None
        self._trained: TrainOp | None = None
        # Kind of call -> the number of its description, and whether it draws. A description is sent once.
        self._graphs: dict[object, tuple[int, bool]] = {}
        self._count = 0
        # The optimizer's settings that the cluster has.
        self._settings = ""
        self._began = False
        # Why the session has ended. "": it has not.
        self._over = ""
        if target:
            self._connection = _connected(target)
            reply, _ = self._ask({"do": "open"})
            self._cluster = TaskCluster(reply["workers"], reply["servers"], reply["task"])

    # --- the interface for scripts -------------------------------------------------------------------------------

    def run(self, fetch: "nn.Module | TrainOp", *args: Any, feed_dict: Mapping[str, Any] | None = None) -> Any:
        """Compute on the cluster, and wait for the result.

        Args:
            fetch: the result of `minimize`: one step of training, which returns the loss, as a number without a
                history. Or its model: it is evaluated with the cluster's values in its present mode (`model.eval()`),
                without gradients, and its output is returned.
            args: of the model's forward; tensors on the CPU.
            feed_dict: more of them, by the names of forward's parameters.

        Raises:
            ConfigError: the model cannot be captured (with the line), or names a place that does not exist, or calls a
                function that the cluster does not run.
            JobError: a task failed. The text names the task, and the session is over then.
        """
        train = fetch if isinstance(fetch, TrainOp) else None
        model = train.model if train is not None else fetch
        if not isinstance(model, nn.Module):
            accepted = "must be a model, or the result of tt.train.minimize"
            raise ConfigError("session.run", type(fetch).__name__, accepted)
        kwargs = dict(feed_dict or {})
        if self._over:
            raise ConfigError("session", self._target, f"is closed: {self._over}")
        if not self._target:
            return _here(model, train, args, kwargs)
        return self._there(model, train, args, kwargs)

    def pull(self) -> None:
        """Copy the cluster's values into the model. Raises JobError if a task is gone."""
        # Before the first run the cluster has no values.
        if not self._began or self._model_state is None or self._over:
            return
        reply, tensors = self._ask({"do": "pull"})
        with torch.no_grad():
            for number, tensor in zip(reply["numbers"], tensors, strict=True):
                self._model_state.tensors[number].copy_(tensor)

    def close(self) -> None:
        """Pull the values and leave the cluster to the next client. May be called twice."""
        if self._connection is None or self._over:
            return
        try:
            self.pull()
            self._ask({"do": "close"})
        finally:
            # Also if the pull has failed: the cluster goes back to waiting when the connection ends.
            self._end("it was closed")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # Without a pull, which would wait for a cluster that may be the cause.
            self._end("its block was left with an error")

    # --- on the cluster ------------------------------------------------------------------------------------------

    def _there(self, model: nn.Module, train: TrainOp | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(model, train, args, kwargs)
        number, draws = self._graph(model, train, args, kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        settings = self._new_settings(train)
        if draws:
            # Masks continue the client's own sequence of random numbers, as if it computed them here.
            tensors.insert(0, torch_state())
        request = {"do": "run", "number": number, "draws": draws, "settings": settings}
        reply, found = self._ask(request, tensors)
        if draws:
            # Where the cluster has stopped drawing.
            set_torch_state(found[0])
        if train is not None:
            # A scheduler warns if the optimizer has made no step, and the step was made on the cluster.
            train.optimizer._opt_called = True  # type: ignore[attr-defined]
        output = decode(reply["output"], ReferenceBounds(0, len(found), 0))
        return replaced(output, lambda ref: found[ref.number], (CallInput,))

    def _check(self, model: nn.Module, train: TrainOp | None, args: Any, kwargs: Any) -> None:
        # The cluster records and runs with the defaults of its own processes.
        if torch.get_default_dtype() is not torch.float32:
            raise ConfigError("torch.set_default_dtype", torch.get_default_dtype(), "must be torch.float32")
        if torch.is_autocast_enabled("cpu"):
            raise ConfigError("torch.autocast", True, "is not known to a session: convert with .to(dtype)")
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and (leaf.device.type != "cpu" or leaf.layout is not torch.strided):
                raise ConfigError("session.run", f"a tensor on {leaf.device}", "must get dense tensors on the CPU")
        if self._model_state is not None and self._model_state.model is not model:
            raise ConfigError("session.run", type(model).__name__, "must be the session's model: one for each session")
        if (
            train is not None
            and self._began
            and (self._trained is None or train.optimizer is not self._trained.optimizer)
        ):
            accepted = "must be the one of the session's first run: a session has one optimizer"
            raise ConfigError("session.run", type(train.optimizer).__name__, accepted)

    def _graph(self, model: nn.Module, train: TrainOp | None, args: Any, kwargs: Any) -> tuple[int, bool]:
        """Return the number of a call's description, and whether it draws masks."""
        # Everything that may change the recorded computation: training or not, the modes, and the arguments' forms.
        kind = (train is not None, tuple(module.training for module in model.modules()), _kind((args, kwargs)))
        if kind not in self._graphs:
            model_state = self._model_state or ModelState.of(model, self._cluster)
            description = record(model_state, args, kwargs, loss=train is not None)
            # Only after `record`: a model that cannot be captured leaves the session as it was.
            self._model_state = model_state
            if not self._began:
                self._begin(model_state, train)
            # Before the request: after a refused description its number is not used again.
            self._count += 1
            data = description.to_data()
            self._ask({"do": "learn", "number": self._count, "description": data, "loss": train is not None})
            draws = any(word in node.function for word in _DRAWS for node in description.nodes)
            self._graphs[kind] = self._count, draws
        return self._graphs[kind]

    def _begin(self, model_state: ModelState, train: TrainOp | None) -> None:
        parameters = [tensor for tensor in model_state.tensors if isinstance(tensor, nn.Parameter)]
        if not parameters:
            raise ConfigError("model", None, "has no parameters: nothing to train")
        # A session that only evaluates needs one as well: servers hold the values, and a server has an optimizer.
        optimizer = torch.optim.SGD(parameters, lr=0.0) if train is None else train.optimizer
        # Its state is in this process, and a session has no way to send it.
        if optimizer.state:
            raise ConfigError("optimizer", type(optimizer).__name__, "has taken steps already: take a new one")
        self._settings = describe(optimizer, parameters).to_text()
        states = [state.to_data() for state in model_state.states()]
        tensors = [tensor.detach() for tensor in model_state.tensors]
        self._ask({"do": "start", "states": states, "optimizer": self._settings}, tensors)
        self._began, self._trained = True, train

    def _new_settings(self, train: TrainOp | None) -> str:
        """Return the optimizer's settings if the cluster has older ones, else ""."""
        if train is None or self._model_state is None:
            return ""
        parameters = [tensor for tensor in self._model_state.tensors if isinstance(tensor, nn.Parameter)]
        text = describe(train.optimizer, parameters).to_text()
        changed = "" if text == self._settings else text
        self._settings = text
        return changed

    def _ask(
        self, request: Mapping[str, Any], tensors: "list[torch.Tensor] | tuple[()]" = ()
    ) -> tuple[dict[str, Any], list[torch.Tensor]]:
        assert self._connection is not None
        try:
            self._connection.send(request, tensors)
            reply, found = self._connection.receive()
        except SessionClosed as error:
            self._end("the cluster is gone")
            raise JobError(f"{self._target} is gone: {error}", False) from error
        # `send` refuses a description that is too large before its first byte, so the session goes on.
        except ConfigError:
            raise
        # After Ctrl-C here the next reply would be the one to this request.
        except BaseException:
            self._end("a run was interrupted")
            raise
        if "error" in reply:
            self._refused(reply)
        return reply, found

    def _refused(self, reply: Mapping[str, Any]) -> NoReturn:
        text = str(reply["error"])
        # A refused description leaves the session as it was. Every other error ends it.
        if reply.get("over", True):
            self._end(text)
        if reply.get("config"):
            raise ConfigError("session", self._target, text)
        raise JobError(text, False)

    def _end(self, why: str) -> None:
        if not self._over:
            self._over = why
            if self._connection is not None:
                self._connection.close()


# --- in this process -------------------------------------------------------------------------------------------------


def _here(model: nn.Module, train: TrainOp | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if train is None:
        with torch.no_grad():
            return model(*args, **kwargs)
    # In the order of a step on the cluster, so that the losses are the same.
    train.optimizer.zero_grad()
    loss = model(*args, **kwargs)
    loss.backward()
    train.optimizer.step()
    return loss.detach()


# --- smaller things --------------------------------------------------------------------------------------------------


def _connected(target: str) -> SessionConnection:
    if not isinstance(target, str) or not target.startswith(SCHEMES):
        accepted = f"must be a worker's Server.target, {' or '.join(f'{scheme}HOST:PORT' for scheme in SCHEMES)}"
        raise ConfigError("target", target, accepted)
    try:
        host, port = split_address(without_scheme(target))
        return call(numeric(host), port, load_secret(os.environ))
    except Refused as error:
        # The process there speaks the protocol, so the address is right.
        if error.code == "AUTH":
            accepted = "has another token than this process: TOPOTRAIN_TOKEN, or TOPOTRAIN_TOKEN_FILE"
        else:
            accepted = f"does not take clients: {error.text}; every task needs tt.train.Server(…, session=True)"
        raise ConfigError("target", target, accepted) from None
    except (OSError, TransportError, StoreError) as error:
        accepted = f"cannot be reached ({error}): a worker's tt.train.Server(…, session=True) must have joined there"
        raise ConfigError("target", target, accepted) from None


def _kind(arguments: Any) -> object:
    leaves, form = tree_flatten(arguments)
    # Values of arguments that are no tensors are part of the recorded computation, so each is another kind.
    return str(form), tuple(
        (leaf.dtype, tuple(leaf.shape)) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )
