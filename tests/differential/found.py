"""What generated scripts have found, by name: blocks (`axis=name`) and the layout. Each is a test."""

ALLREDUCE = tuple(
    (blocks, "allreduce")
    for blocks in (
        *("average=swapped", "average=swapped_load", "average=ema_final"),
        *("writes=data_first", "writes=load_first", "writes=copy_first", "writes=replaced"),
        *("state=clear", "state=new", "state=zero", "state=delete", "state=empty", "state=read_own"),
        *("flow=break_stopped", "phases=second", "phases=second_prepared", "wrapper=lookahead", "wrapper=sam"),
        *("wrapper=sam_class",),
        *("hooks=clamp_before", "hooks=clamp_after", "hooks=post_before", "hooks=post_after"),
        *("data=second", "data=second_own", "data=renewed", "data=as_is", "end=layer", "end=scale", "end=best"),
        *("writes=data", "writes=data_step", "writes=numpy", "writes=numpy_step", "average=swa"),
        *("gradients=autograd", "gradients=vmap", "gradients=func", "gradients=set", "gradients=create_graph"),
        *(
            "gradients=autograd clipping=norm",
            "gradients=func clipping=by_hand",
            "gradients=vmap clipping=ours",
            "flow=no_graph",
            "flow=no_backward",
            "hooks=clamp_before silent=no_zero_grad",
            "hooks=tensor_after silent=no_zero_grad",
            "clipping=replaced hooks=clamp_before silent=no_zero_grad",
            "hooks=clamp_before gradients=create_graph",
            "hooks=post_before gradients=set",
            "data=renewed gradients=autograd",
            "data=renewed gradients=set",
            "data=second flow=continue",
            "data=second_uneven",
            "data=second_uneven flow=continue",
            "data=second_taken",
        ),
    )
)
FOUND = (*ALLREDUCE, ("writes=numpy_step silent=stale", "island"))
FOUND_LIBRARY = (
    ("data=stream", "allreduce"),
    ("library=accelerate data=stream validation=each_epoch", "sandblaster"),
    ("data=uneven times=twice", "allreduce"),
    ("library=lightning data=small_last times=twice", "sandblaster"),
    ("library=manual average=swapped stop=number times=twice", "tcp"),
)
"""The same of scripts whose loop is a library's."""
