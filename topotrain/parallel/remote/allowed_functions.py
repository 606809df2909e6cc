"""Functions of torch that a graph description may call.

They make tensors out of tensors and numbers. A function that is not listed is never called. Left out on purpose are:

- Functions that read or write files or run code.
- Functions that expose uninitialized memory (`empty`, `as_strided`, `set_`).
- Functions that draw random numbers, except dropout.

Some functions read or write beyond their arguments where these do not fit together. They are called after a check.
"""

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import overrides
from torch._subclasses.fake_tensor import FakeTensor

_LAYERS = """
    linear bilinear embedding conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d pad interpolate unfold fold
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d
    batch_norm layer_norm group_norm instance_norm rms_norm local_response_norm normalize
    multi_head_attention_forward scaled_dot_product_attention
    dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout
    relu relu6 leaky_relu elu selu celu gelu silu mish sigmoid tanh hardtanh hardswish hardsigmoid softplus softsign
    logsigmoid softmax log_softmax softmin glu prelu threshold tanhshrink softshrink hardshrink
    cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div
    binary_cross_entropy_with_logits cosine_embedding_loss margin_ranking_loss hinge_embedding_loss poisson_nll_loss
    gaussian_nll_loss cosine_similarity pairwise_distance one_hot pixel_shuffle pixel_unshuffle
"""
_MAKERS = "tensor zeros ones full arange linspace eye zeros_like ones_like full_like scalar_tensor"
_FUNCTIONS = (
    "cat concat stack hstack vstack where einsum outer bmm meshgrid tril_indices triu_indices lstm gru rnn_tanh"
)
_BOTH = """
    abs add addmm addcmul addcdiv all amax amin any argmax argmin argsort atan2 baddbmm bmm broadcast_to ceil chunk
    clamp clamp_max clamp_min clone cos cosh cumprod cumsum detach diagonal diff div dot eq erf erfc exp expm1 flatten
    flip floor floor_divide fmod gather ge gt index_select isfinite isnan isinf le lerp log log10 log1p log2 logical_and
    logical_not logical_or logsumexp lt masked_fill masked_select matmul max maximum mean median min minimum mm
    movedim mul mv narrow ne neg norm numel permute pow prod reciprocal remainder repeat_interleave reshape roll round
    rsqrt scatter scatter_add select sigmoid sign sin sinh softmax log_softmax sort split split_with_sizes sqrt square
    squeeze std sub sum swapaxes t take_along_dim tan tanh tensor_split tile topk transpose tril triu true_divide
    trunc unbind unflatten unsqueeze var vdot xlogy relu special_expm1 outer
"""
_METHODS = """
    __getitem__ __setitem__ __rsub__ __rtruediv__ __rdiv__ __rpow__ __rmatmul__ __rfloordiv__ __and__ __or__ __xor__
    __invert__ __rmod__
    add_ sub_ mul_ div_ pow_ clamp_ relu_ sigmoid_ tanh_ exp_ neg_ zero_ fill_ copy_ masked_fill_ addcmul_ addcdiv_
    contiguous expand expand_as view view_as reshape_as repeat to type_as float double half bfloat16 int long bool
    new_zeros new_ones new_full new_tensor
"""
_ATTRIBUTES = "T mT"
_GATES = {"lstm": 4, "gru": 3, "rnn_tanh": 1}


def _table() -> dict[str, Callable[..., Any]]:
    homes = (
        ("torch.nn.functional", torch.nn.functional, _LAYERS),
        ("torch", torch, f"{_MAKERS} {_FUNCTIONS} {_BOTH}"),
        ("torch.Tensor", torch.Tensor, f"{_BOTH} {_METHODS}"),
    )
    found = {f"{home}.{name}": getattr(space, name, None) for home, space, names in homes for name in names.split()}
    for name in _ATTRIBUTES.split():
        found[f"torch.Tensor.{name}.__get__"] = getattr(torch.Tensor, name).__get__
    # A name may be missing in `torch`, in `torch.Tensor`, or in an older version.
    return {name: function for name, function in found.items() if function is not None}


@wraps(torch.repeat_interleave)
def _repeat_interleave(
    input: torch.Tensor, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> torch.Tensor:
    """Check the counts, which torch trusts where it is given the size of the output."""
    # Fake tensors have no values: they are checked when the description is run.
    if isinstance(repeats, torch.Tensor) and not isinstance(repeats, FakeTensor):
        counts, size = repeats.reshape(-1).tolist(), input.numel() if dim is None else input.size(dim)
        total = sum(counts) * (size if len(counts) == 1 else 1)  # without the overflow of torch's sum
        if min(counts, default=0) < 0 or total >= 1 << 62 or output_size not in (None, total):
            raise ValueError(f"repeats must be at least 0, and their sum must be the size of the output, {output_size}")
    return torch.repeat_interleave(input, repeats, dim, output_size=output_size)


def _recurrent(function: Callable[..., Any], gates: int) -> Callable[..., Any]:
    """Return a recurrent function that checks the sizes of its states and weights."""

    @wraps(function)
    def checked(
        input: torch.Tensor,
        states: Any,
        weights: Any,
        bias: bool,
        layers: int,
        dropout: float,
        train: bool,
        both: bool,
        batch_first: bool,
    ) -> Any:
        if not isinstance(weights, list | tuple):
            raise ValueError("packed sequences cannot be sent to a session")
        first, last = (states if isinstance(states, list | tuple) else (states, states))[:2]
        ways, hidden, out = 1 + both, last.size(-1), first.size(-1)
        expected: list[tuple[int, ...]] = []
        for size in [input.size(-1), *[ways * out] * (layers - 1)]:
            one = [(gates * hidden, size), (gates * hidden, out), *[(gates * hidden,)] * (2 if bias else 0)]
            expected += [*one, *[(out, hidden)] * (out != hidden)] * ways
        batch = input.size(0 if batch_first else 1)
        sizes = [tuple(state.shape) for state in (first, last)], [tuple(weight.shape) for weight in weights]
        if input.dim() != 3 or sizes != ([(layers * ways, batch, size) for size in (out, hidden)], expected):
            raise ValueError("the sizes of input, states and weights do not fit together")
        return function(input, states, weights, bias, layers, dropout, train, both, batch_first)

    return checked


_TORCH = _table()
FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **_TORCH,
    **{f"{home}.repeat_interleave": _repeat_interleave for home in ("torch", "torch.Tensor")},
    **{f"torch.{name}": _recurrent(_TORCH[f"torch.{name}"], gates) for name, gates in _GATES.items()},
}
"""Functions by the names that torch itself gives them (`torch.overrides.resolve_name`)."""


def name_of(function: object) -> str:
    """Return a name in FUNCTIONS, or another one if the function is not there."""
    name = overrides.resolve_name(function) or ""
    if name in FUNCTIONS:
        return name
    own = str(getattr(function, "__name__", function))
    text = f"torch.{own}" if getattr(torch, own, None) is function else own
    # The table may have the same function under another name.
    return _AGAIN.get(function, name or text)


_AGAIN: Mapping[object, str] = {function: name for name, function in (*_TORCH.items(), *FUNCTIONS.items())}
