"""A gradient of which the mean stays at the servers until the script reads it.

With `grads: kVisible` a script may look at the mean of its group between `backward()` and `step()`, and most scripts
never do. So `.grad` is a tensor without memory, which knows its shape and dtype. The first use of anything else brings
all means of the backward, and is made with them.
"""

from abc import ABC, abstractmethod
from typing import Any
from weakref import ref

import torch


class MeanReader(ABC):
    """Brings the means that were left at the servers."""

    @abstractmethod
    def read_means(self) -> None:
        """Give each lazy gradient that is still alive its mean. Raises JobError, PeerLost."""


_ATTRIBUTES = "shape dtype device layout ndim itemsize nbytes grad_fn requires_grad is_leaf is_sparse is_sparse_csr "
_ATTRIBUTES += "is_cuda is_cpu is_meta is_quantized is_nested is_mkldnn _version"
_METHODS = "size dim numel nelement ndimension stride element_size get_device __len__ __hash__ is_floating_point "
_METHODS += "is_complex is_signed is_contiguous"
_DESCRIBES = frozenset(
    [getattr(torch.Tensor, name).__get__ for name in _ATTRIBUTES.split()]
    + [getattr(torch.Tensor, name) for name in _METHODS.split()]
)
"""What a tensor without memory can answer."""


class LazyGradient(torch.Tensor):
    """The mean of a parameter's gradient, before and after it was read.

    torch asks a subclass at every use: in Python (`__torch_function__`), and in its own code (`__torch_dispatch__`). A
    use of the memory past both of them, which does not exist, is torch's error.

    Args:
        like: the parameter.
        reader: brings the mean.
        name: of the parameter.
    """

    plain: torch.Tensor | None
    """The mean, once it was read."""

    @staticmethod
    def __new__(cls, like: torch.Tensor, reader: MeanReader, name: str) -> "LazyGradient":
        made: LazyGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=like.device
        )
        # Without it code that reads memory itself would find an address of 0, and the process would end.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    def __init__(self, like: torch.Tensor, reader: MeanReader, name: str) -> None:
        # The garbage collector does not see `.grad`: a strong reference would keep the model for ever.
        self._reader, self._name = ref(reader), name
        self.plain = None

    def read(self) -> torch.Tensor:
        """The mean, which is the parameter's `.grad` from now on.

        Raises RuntimeError after the end of the job.
        """
        reader = self._reader()
        if self.plain is None and reader is not None:
            reader.read_means()
        if self.plain is None:
            raise RuntimeError(
                f"the gradient of {self._name} is at the servers of a job that is over: read it before the job ends"
            )
        return self.plain

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _DESCRIBES and isinstance(args[0], LazyGradient) and args[0].plain is None:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs or {})
        return func(*_read(args), **_read(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        return func(*_read(args), **_read(kwargs or {}))


def _read(value: Any) -> Any:
    """Replace each lazy gradient in arguments of torch by its mean."""
    if isinstance(value, LazyGradient):
        return value.read()
    if isinstance(value, dict):
        return {key: _read(each) for key, each in value.items()}
    return type(value)(map(_read, value)) if type(value) in (list, tuple) else value
