"""The MLP of the other tables under TensorFlow's ParameterServerStrategy: 2 workers and 1 server, beside one process.

Runs in an environment that has TensorFlow and not topotrain. The last line printed is JSON: the samples per second of
the two workers as a multiple of those of one process, and TensorFlow's version.
"""

import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

BATCH, STEPS, ROUNDS = 80, 12, 5


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def serve(cluster: dict[str, list[str]], job: str, index: int) -> None:
    """Be one of the cluster's servers until killed."""
    import tensorflow as tf

    one_thread(tf)
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc")
    server.join()


def one_thread(tf: object) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)  # type: ignore[attr-defined]
    tf.config.threading.set_inter_op_parallelism_threads(1)  # type: ignore[attr-defined]


def model(tf: object) -> tuple[list[object], Callable[[], object]]:
    """Variables of the MLP, and a function that takes one step with SGD."""
    sizes = [1024, 2048, 2048, 2048, 10]
    variables = []
    for before, after in pairwise(sizes):
        variables.append(tf.Variable(tf.random.normal((before, after), stddev=before**-0.5)))
        variables.append(tf.Variable(tf.zeros((after,))))
    inputs, targets = tf.random.normal((BATCH, 1024)), tf.random.uniform((BATCH,), maxval=10, dtype=tf.int32)

    @tf.function
    def step() -> object:
        with tf.GradientTape() as tape:
            x = inputs
            for layer in range(4):
                x = x @ variables[2 * layer] + variables[2 * layer + 1]
                x = tf.nn.relu(x) if layer < 3 else x
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, x))
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(0.01 * gradient)
        return loss

    return variables, step


def main() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(4)]
    cluster = {"worker": addresses[:2], "ps": addresses[2:3], "chief": addresses[3:]}
    context = multiprocessing.get_context("spawn")
    jobs = [("worker", 0), ("worker", 1), ("ps", 0)]
    servers = [context.Process(target=serve, args=(cluster, job, n), daemon=True) for job, n in jobs]
    for server in servers:
        server.start()
    import tensorflow as tf

    one_thread(tf)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        _, shared = model(tf)
    with tf.device("/job:chief/task:0"):
        _, alone = model(tf)

    def together() -> float:
        began = time.perf_counter()
        for _ in range(2 * STEPS):
            coordinator.schedule(shared)
        coordinator.join()
        return (time.perf_counter() - began) / (2 * STEPS)

    def single() -> float:
        began = time.perf_counter()
        for _ in range(STEPS):
            alone()
        return (time.perf_counter() - began) / STEPS

    together(), single()
    times = [(single(), together()) for _ in range(ROUNDS)]
    multiple = statistics.median(one for one, _ in times) / statistics.median(two for _, two in times)
    print(json.dumps({"multiple": multiple, "version": tf.__version__}), flush=True)
    os._exit(0)  # the servers are daemons and TensorFlow's own end takes its time


if __name__ == "__main__":
    main()
