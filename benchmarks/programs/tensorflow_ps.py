"""The MLP of the other tables under TensorFlow's ParameterServerStrategy: 2 workers and 1 server, beside one process.

Runs in an environment that has TensorFlow and not topotrain. The last line printed is JSON: seconds per step and round
of the process alone and of the two workers together (a step of either counts), and TensorFlow's version.

Rule: every process computes with one thread, as in the other tables. The cluster's processes may have more operations
under way, though (THREADS): a worker that waits for a variable holds a thread, and so does the server, so with a single
one the first step never ends. TensorFlow's own tests ask for one more than there are workers.
"""

import argparse
import json
import multiprocessing
import os
import socket
import time
from collections.abc import Callable
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from typing import Any

BATCH, SIZES, RATE, MOMENTUM = 80, (1024, 2048, 2048, 2048, 10), 0.01, 0.9
WORKERS = 2
THREADS = WORKERS + 1
Cluster = dict[str, list[str]]


def tensorflow(operations: int) -> Any:
    """TensorFlow, with one thread for computing and `operations` that may be under way at once."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(operations)
    return tf


def addresses(count: int) -> list[str]:
    """Free ports of this host; all are held until the last one is found, so no two are the same."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    found = [f"127.0.0.1:{one.getsockname()[1]}" for one in held]
    for one in held:
        one.close()
    return found


def until_orphaned() -> None:
    """Wait for the end of the process that started this one, then end at once: TensorFlow's servers never do."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(0)


def serve(cluster: Cluster, job: str, index: int, line: Connection) -> None:
    """Be one of the cluster's servers; says so on `line`."""
    tf = tensorflow(THREADS)
    server = tf.distribute.Server(tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc")
    line.send(server.target)
    until_orphaned()


def alone(line: Connection) -> None:
    """Train by order, without a cluster: a number of steps comes, the seconds that they took go."""
    step = training(tensorflow(1))
    step()
    line.send("ready")
    while True:
        try:
            steps = line.recv()
        except EOFError:
            os._exit(0)
        began = time.perf_counter()
        for _ in range(steps):
            step()
        line.send(time.perf_counter() - began)


def training(tf: Any) -> Callable[[], Any]:
    """One step of SGD with momentum on a batch that is part of the graph, so that it is wherever the step runs."""
    tf.random.set_seed(0)
    shapes = [shape for a, b in pairwise(SIZES) for shape in ((a, b), (b,))]
    variables = [tf.Variable(tf.random.normal(shape, stddev=SIZES[0] ** -0.5)) for shape in shapes]
    momenta = [tf.Variable(tf.zeros(shape), trainable=False) for shape in shapes]
    samples = tf.random.normal((BATCH, SIZES[0])).numpy()
    classes = tf.random.uniform((BATCH,), maxval=SIZES[-1], dtype=tf.int32).numpy()

    @tf.function
    def step() -> Any:
        with tf.GradientTape() as tape:
            x = tf.constant(samples)
            for weight, bias in zip(variables[:-2:2], variables[1:-2:2]):
                x = tf.nn.relu(x @ weight + bias)
            x = x @ variables[-2] + variables[-1]
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(tf.constant(classes), x))
        for variable, momentum, gradient in zip(variables, momenta, tape.gradient(loss, variables)):
            with tf.device(variable.device):  # gradients travel, as in topotrain; the server updates
                tf.raw_ops.ResourceApplyMomentum(
                    var=variable.handle, accum=momentum.handle, lr=RATE, grad=gradient, momentum=MOMENTUM
                )
        return loss

    return step


def start(context: Any, target: Callable[..., None], *args: object) -> Connection:
    """A process and the line to it."""
    ours, theirs = context.Pipe()
    context.Process(target=target, args=(*args, theirs), daemon=True).start()
    theirs.close()
    return ours  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10, help="per process and turn")
    options = parser.parse_args()
    found = addresses(WORKERS + 2)
    cluster = {"worker": found[:WORKERS], "ps": found[WORKERS:-1], "chief": found[-1:]}
    context = multiprocessing.get_context("spawn")
    jobs = [*(("worker", number) for number in range(WORKERS)), ("ps", 0)]
    one, *servers = [start(context, alone), *(start(context, serve, cluster, *job) for job in jobs)]
    tf = tensorflow(THREADS)  # takes seconds, while theirs do
    for line in (one, *servers):
        line.recv()  # EOFError if that process has died
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        step = training(tf)

    def single() -> float:
        one.send(options.steps)
        return float(one.recv()) / options.steps

    def together() -> float:
        steps = WORKERS * options.steps
        began = time.perf_counter()
        for _ in range(steps):
            coordinator.schedule(step)
        coordinator.join()
        return (time.perf_counter() - began) / steps

    times = [(single(), together()) for _ in range(options.rounds + 1)][1:]  # the first round does not count
    alone_s, together_s = zip(*times)
    print(json.dumps({"alone": alone_s, "together": together_s, "version": tf.__version__}), flush=True)
    os._exit(0)  # all others end with this process, and TensorFlow's own end takes its time


if __name__ == "__main__":
    main()
