"""What generated scripts have found, by name: blocks (`axis=name`) and the layout. Each is a test.

What ends as in plain Python is found in scripts of several blocks; what is refused ends its script, and stands alone.
"""

EQUAL = (
    ("gradients=vmap clipping=ours data=second flow=continue", "allreduce"),
    ("hooks=tensor_after silent=no_zero_grad average=swapped writes=data_first", "allreduce"),
    ("hooks=post_before gradients=set average=swapped_load writes=copy_first", "allreduce"),
    ("average=ema_final state=clear wrapper=sam hooks=clamp_before", "allreduce"),
    ("state=new wrapper=sam_class hooks=clamp_after data=second", "allreduce"),
    ("state=zero hooks=post_before data=as_is end=layer", "allreduce"),
    ("state=delete hooks=post_after end=scale average=swa", "allreduce"),
    ("state=empty end=best gradients=autograd data=second_uneven", "allreduce"),
    ("state=read_own gradients=vmap", "allreduce"),
    ("flow=no_graph", "allreduce"),
    ("flow=no_backward", "allreduce"),
    ("model=compiled data=processes", "sandblaster"),
    ("accumulation=three data=stream scheduler=step", "tcp"),
    ("gradients=two clipping=norm optimizer=groups data=sampler", "sandblaster"),
    ("scaler=scaler flow=break scheduler=cosine optimizer=momentum", "memory"),
    ("gradients=func data=collated", "sandblaster"),
    ("gradients=set data=whole_batches", "allreduce"),
    ("writes=numpy_step silent=stale", "island"),
)
EQUAL_ALIKE = (("hooks=clamp_before silent=no_zero_grad data=second_uneven flow=continue", "allreduce"),)
"""Each block of them is in another one above: in the soak."""
REFUSED = tuple(
    (blocks, "allreduce")
    for blocks in (
        "clipping=replaced hooks=clamp_before silent=no_zero_grad",
        *("writes=data_step", "writes=replaced", "flow=break_stopped", "phases=second", "data=second_own"),
        *("gradients=create_graph", "gradients=autograd clipping=norm", "data=second_taken"),
    )
)
REFUSED_ALIKE = tuple(
    (blocks, "allreduce")
    for blocks in (
        *("writes=load_first", "writes=data", "writes=numpy", "writes=numpy_step", "wrapper=lookahead"),
        *("phases=second_prepared", "data=renewed", "data=renewed gradients=autograd", "data=renewed gradients=set"),
        *("gradients=func clipping=by_hand", "hooks=clamp_before gradients=create_graph"),
    )
)
"""Refused with the words of another one above: in the soak."""
FOUND_LIBRARY = (
    ("data=stream", "allreduce"),
    ("library=accelerate data=stream validation=each_epoch", "sandblaster"),
    ("data=uneven times=twice", "allreduce"),
    ("library=lightning data=small_last times=twice", "sandblaster"),
    ("library=manual average=swapped stop=number times=twice", "tcp"),
)
"""The same of scripts whose loop is a library's."""
