"""What a script calls: nothing in an ordinary process, and one whole job of one worker in this process."""

import copy
import sys

import pytest
import torch
from in_process_job import adam, cross_entropy, mlp, sgd
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from script_job import job as job  # a fixture
from script_job import loader, plain, train, unfused
from torch import nn

import topotrain as tt
from topotrain.comm.security.handshake import HandshakeAborted, HandshakeTimeout
from topotrain.comm.transport import ConnectionLost
from topotrain.config.job import Adam as AdamConf
from topotrain.config.job import ConfigError, LRGen, Step, Updater
from topotrain.core import events
from topotrain.core.client.client import JobError
from topotrain.launch import choose_cause
from topotrain.launch.log_lines import without_stamps
from topotrain.launch.runtime import entry_points
from topotrain.parallel.api.dry_run import state_factor
from topotrain.training import finish_job, misuse_checks
from topotrain.training.final_parameters import save_final
from topotrain.training.parameters.flat_parameters import describe_model

# --- an ordinary process -----------------------------------------------------------------------------------------


def test_in_an_ordinary_process_prepare_returns_the_very_same_objects_and_bits():
    torch.manual_seed(3)
    model = mlp()
    optimizer, batches = sgd(model), loader()
    before = (type(optimizer), [p.data_ptr() for p in model.parameters()])
    found = tt.prepare(model, optimizer, batches)
    assert found[0] is model and found[1] is optimizer and found[2] is batches
    assert (type(optimizer), [p.data_ptr() for p in model.parameters()]) == before
    losses = train(*found)
    values, plain_losses, rng = plain()
    assert losses == plain_losses
    assert all(torch.equal(v, values[n]) for n, v in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), rng)


def test_as_many_things_come_back_as_were_given_in_any_order_and_as_often_as_one_likes():
    first, second, batches, scaler = mlp(), nn.Linear(2, 2), loader(), torch.amp.GradScaler("cpu")
    one, two = sgd(first), adam(second)
    for given in ((first, one), (first, second, one, two, batches), (batches, two, second, scaler), (first, one, None)):
        found = tt.prepare(*given)
        assert isinstance(found, tuple) and all(a is b for a, b in zip(found, given, strict=True))
    assert tt.prepare(two) is two
    scheduler = torch.optim.lr_scheduler.StepLR(one, 1)
    assert len(tt.prepare(first, one, None, scheduler, scaler)) == 5


REFUSED = [
    (lambda m: (m, [sgd(m), adam(m)], loader()), r"tt.prepare = 'list': must be a torch.nn.Module, .* one by one"),
    (lambda m: (torch.amp.GradScaler("cpu"),), "tt.prepare: must have a torch.nn.Module, or an optimizer"),
    (lambda m: (lambda x: x, sgd(m)), "must be a torch.nn.Module"),
    (lambda m: (m, sgd(m), None, 3), "int.*state_dict and load_state_dict"),
    (lambda m: (m, sgd(m), [1]), "list.*must be a torch.nn.Module, a torch.optim optimizer"),
]


@pytest.mark.parametrize("in_a_job", [False, True])
def test_what_prepare_refuses(job, in_a_job):
    if in_a_job:
        job()
    for given, words in (*REFUSED, (lambda m: (m, None), "updater block" if in_a_job else "an optimizer is needed")):
        with pytest.raises(ConfigError, match=words):
            tt.prepare(*given(mlp()))


@pytest.mark.parametrize("in_a_job", [False, True])
def test_epochs_is_range_and_loops_over_it_follow_one_another(job, in_a_job):
    if in_a_job:
        job()
        model = mlp()
        tt.prepare(model, sgd(model))
    for _ in (bar := tt.epochs(3)):
        break
    assert list(tt.epochs(2)) == [0, 1] and list(tt.epochs(0)) == []
    assert len(bar) == 3 and [len(bar) for _ in bar] == [3, 3, 3]
    seen = []
    with pytest.raises(ConfigError, match=r"tt.epochs = 2: has another loop over tt.epochs inside"):
        seen.extend((outer, inner) for outer in tt.epochs(2) for inner in tt.epochs(2))
    assert seen == [(0, 0), (0, 1)]
    for count in (-1, 2.0, "3", True, None):
        with pytest.raises(ConfigError, match=r"tt.epochs.*: must be a whole number >= 0"):
            tt.epochs(count)


def test_only_public_names_are_listed_and_a_misspelled_one_is_answered_with_the_nearest():
    assert dir(tt) == sorted([*tt.__all__, "__version__"])
    assert all(getattr(tt, name) is not None for name in tt.__all__)
    with pytest.raises(AttributeError, match="prepair") as caught:
        _ = tt.prepair
    assert (caught.value.name, caught.value.obj) == ("prepair", tt)


def test_report_prints_numbers_and_what_functions_give_and_refuses_the_rest(capsys):
    tt.report(accuracy=0.98765432, loss=lambda: torch.tensor(0.25), steps=12)
    assert capsys.readouterr().out == "accuracy: 0.987654\nloss: 0.25\nsteps: 12\n"
    for wrong in ("good", None, [1.0]):
        with pytest.raises(ConfigError, match=r"tt.report note"):
            tt.report(accuracy=1.0, note=wrong)
    assert capsys.readouterr().out == ""


def test_local_and_weight_do_nothing_and_clip_is_torchs():
    model = mlp()
    assert tt.rank() == 0 and tt.is_main()
    with tt.local():
        model(torch.ones(1, 12)).sum().backward()
    tt.weight(7)
    reference = copy.deepcopy(model)
    for p, q in zip(model.parameters(), reference.parameters()):
        q.grad = p.grad.clone()
    norm = tt.clip_grad_norm_(model.parameters(), 0.1)
    assert torch.equal(norm, nn.utils.clip_grad_norm_(reference.parameters(), 0.1))
    assert torch.equal(model[0].weight.grad, reference[0].weight.grad)
    with pytest.raises(ValueError, match="weight = -1: must be >= 0"):
        tt.weight(-1)


# --- a job of one worker -----------------------------------------------------------------------------------------


def test_a_job_of_one_worker_has_the_plain_scripts_bits(job, tmp_path):
    here = job()
    torch.manual_seed(3)
    model = mlp()
    model, optimizer, batches = tt.prepare(model, unfused(model), loader())
    assert isinstance(optimizer, torch.optim.Adam) and len(batches) == 5 and tt.rank() == 0 and tt.is_main()
    losses = train(model, optimizer, batches)
    tt.report(accuracy=lambda: 0.5, last=losses[-1])
    here.finish()
    values, plain_losses, _ = plain(unfused)
    assert losses == plain_losses
    saved = load_file(tmp_path / "final.safetensors")
    assert saved.keys() == values.keys() and all(torch.equal(saved[n], v) for n, v in values.items())
    (metrics,) = here.heard(events.Metrics)
    assert metrics.values == {"accuracy": 0.5, "last": losses[-1]}
    (done,) = here.heard(events.Finished)
    assert (done.steps, done.samples, done.who) == (10, 80, "worker 0/0") and done.bytes_out > 0
    assert here.heard(events.StepDone)[0].loss == pytest.approx(losses[0])
    mlp().load_state_dict(saved)


# --- a script that trains something else than what it has prepared ----------------------------------------------------


def notices(here):
    return [event.text for event in here.heard(events.Notice)]


NOT_KEPT = "before any batch of the loader that tt.prepare returned"


@pytest.mark.parametrize(
    ("prepared", "trained", "words"),
    [("own", "own", NOT_KEPT), ("own", "returned", ""), (None, "own", "")],
    ids=["not kept", "kept", "never given"],
)
def test_a_loader_that_was_not_kept_is_told_once(job, prepared, trained, words):
    here, model, own, aside = job(), mlp(), loader(), mlp()
    optimizer = sgd(model)
    returned = tt.prepare(model, optimizer, own if prepared else None)[2]
    train(model, optimizer, own if trained == "own" else returned)
    train(aside, adam(aside), loader(), 1)  # is the script's own business
    here.finish()
    assert [words in said for said in notices(here)] == ([True] if words else [])
    if words:
        assert notices(here)[0].endswith("model, optimizer, loader = tt.prepare(model, optimizer, loader)")


def test_another_optimizer_over_a_parameter_of_the_model_is_named(job):
    here, model = job(), mlp()
    other = adam(model[2])
    model, optimizer, batches = tt.prepare(model, sgd(model), loader())
    x, y = next(iter(batches))
    cross_entropy(model, x, y).backward()
    optimizer.step()
    optimizer.zero_grad()
    other.step()  # no gradient, no change
    cross_entropy(model, x, y).backward()
    named = r"another optimizer = 'Adam': has changed parameter 2.weight and 1 more .* only the SGD that tt.prepare"
    with pytest.raises(ConfigError, match=named):
        other.step()
    finish_job.close(here.context, finished=False)
    other.step()


def makes_no_step():
    model = mlp()
    model, _, batches = tt.prepare(model, sgd(model), loader())
    for x, y in batches:
        cross_entropy(model, x, y).backward()


def trains_another_model():
    model = mlp()
    optimizer = sgd(model)
    tt.prepare(model, optimizer)
    train(mlp(), optimizer, loader())


@pytest.mark.parametrize(
    ("script", "words"),
    [
        (lambda: None, r"ended without calling topotrain.prepare"),
        (lambda: tt.prepare(mlp()), "Sequential.*must have an optimizer, or None in its place"),
        (lambda: tt.prepare(sgd(mlp())), "SGD.*must come with the torch.nn.Module that it trains"),
        (makes_no_step, r"program: went backward 5 times and never called step\(\) of the SGD"),
        (trains_another_model, r"called optimizer.step\(\) 10 times, and no parameter of the model"),
    ],
)
def test_a_script_that_has_trained_nothing_is_told_so_at_its_end(job, script, words):
    here = job()
    script()
    with pytest.raises(ConfigError, match=words):
        finish_job.finish(here.context)
    with entry_points.ProgramGuard(here.context, None) as guard:
        finish_job.finish(here.context)
    assert guard.code == 2
    if "must" in words:  # what no later call has brought is missed at each use
        with pytest.raises(ConfigError, match=words):
            list(tt.epochs(1))


def test_a_script_that_only_evaluates_is_no_mistake(job):
    here, model = job(), mlp()
    model, _optimizer, batches = tt.prepare(model, sgd(model), loader())
    for x, _ in batches:
        model(x)
    with tt.local():
        model(x).sum().backward()
    here.finish()
    assert notices(here) == ["the program never called optimizer.step(): nothing was trained"]
    assert here.heard(events.Final)


def test_an_exception_of_the_program_explains_more_than_what_a_server_says_of_it():
    kinds = [finish_job.kind_of(error) for error in (JobError("left early", False), JobError("no", True), ValueError())]
    assert kinds == ["internal", "config", "program"]
    assert finish_job.kind_of(JobError("not finite again", False, True)) == "quarantine"
    assert [
        finish_job.kind_of(error) for error in (ConnectionLost("no way"), HandshakeAborted(""), HandshakeTimeout(""))
    ] == ["peer"] * 3
    assert (
        choose_cause([events.Failed("worker 0/0", kinds[0], "", ""), events.Failed("w", kinds[2], "", "")]).who == "w"
    )


@pytest.mark.parametrize(
    ("script", "end"),
    [
        ('raise ValueError("bad")', "ValueError: bad"),
        ("import sys; sys.exit(3)", "RuntimeError: the program left with exit code 3"),
    ],
)
def test_what_a_program_raises_is_told_from_its_own_lines_on(job, tmp_path, monkeypatch, capsys, script, end):
    here = job()
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)  # typer, in an earlier test, may have set its own
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    program, log = tmp_path / "bad.py", tmp_path / "log"
    program.write_text(script + "\n")
    with entry_points.ProgramGuard(here.context, log) as guard:
        entry_points.run_program(str(program), [])
    assert guard.code == 1
    told = [event for event in here.told if isinstance(event, events.Failed)]
    lines = told[0].traceback.splitlines()
    frames = [line for line in lines if line.startswith("  File ")]  # first the calls of this test
    assert frames[-1] == f'  File "{program}", line 1, in <module>'
    assert lines[-1] == told[0].text == end
    assert without_stamps(log.read_bytes()).decode() == told[0].traceback
    assert log.read_text().count(f"Z {here.context.me} | ") == len(lines)
    assert capsys.readouterr().err == ""


def run_as_program(here, folder, monkeypatch, text):
    """The exit code of a program of these lines, what was told of it, its file and its log."""
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(sys, "path", [*sys.path])
    program, log = folder / "bad.py", folder / "log"
    program.write_text(text)
    with entry_points.ProgramGuard(here.context, log) as guard:
        entry_points.run_program(str(program), [])
    (told,) = (event for event in here.told if isinstance(event, events.Failed))
    return guard.code, told, program, log.read_text()


@pytest.mark.parametrize("quarantine", [True, False])
def test_an_error_of_the_job_is_told_in_its_own_words(job, tmp_path, monkeypatch, quarantine):
    """The report has the line of the program, and the log all lines."""
    text = f"raise JobError('the gradient of w is not finite', False, {quarantine})"
    lines = f"from topotrain.core.client.client_context import JobError\n{text}\n"
    code, told, program, log = run_as_program(job(), tmp_path, monkeypatch, lines)
    kind = "quarantine" if quarantine else "internal"
    assert (code, told.text, told.kind) == (1, "the gradient of w is not finite", kind)
    assert told.traceback == f'  File "{program}", line 2, in <module>\n    {text}\n' and "Traceback" in log


@pytest.mark.parametrize(("version", "nearest"), [((3, 11), " Did you mean: 'prepare'?"), ((3, 12), ""), ((3, 14), "")])
def test_a_misspelled_name_is_told_with_the_nearest_one(version, nearest):
    """From 3.12 on, `traceback` adds the name itself."""
    with pytest.raises(AttributeError) as raised:
        tt.prepair  # noqa: B018
    misuse_checks.name_nearest(raised.value, version)
    assert str(raised.value) == "module 'topotrain' has no attribute 'prepair'" + "." * bool(nearest) + nearest


def test_what_a_job_prints_names_the_nearest_name_once(job, tmp_path, monkeypatch):
    _, told, _, _ = run_as_program(job(), tmp_path, monkeypatch, "import topotrain as tt\ntt.prepair\n")
    end = "Did you mean: 'prepare'?"
    assert told.traceback.count(end) == told.text.count(end) == 1


def test_the_updater_block_builds_the_optimizer_and_moves_its_rate(job):
    rate = LRGen(type="kStep", base_lr=0.1, step_conf=Step(change_freq=2, gamma=0.5))
    here = job(updater=Updater(type="kAdam", adam_conf=AdamConf(), learning_rate=rate))
    model, optimizer = tt.prepare(mlp(), None)
    assert isinstance(optimizer, torch.optim.Adam)
    seen = []
    for x, y in loader():
        seen.append(optimizer.param_groups[0]["lr"])
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        optimizer.step()
    assert seen == pytest.approx([0.1, 0.1, 0.05, 0.05, 0.025])
    here.finish()


def test_weight_local_and_clip_reach_the_worker(job):
    here = job(grads="kHidden")
    model = mlp()
    model, optimizer = tt.prepare(model, sgd(model))
    tt.weight(7)
    worker = here.context.worker
    assert worker.batches.weight() == 7.0
    with tt.local():
        assert worker.path.private
    assert not worker.path.private
    x, y = next(iter(loader()))
    norms = []
    for _ in range(2):
        optimizer.zero_grad()
        cross_entropy(model, x, y).backward()
        norms.append(float(tt.clip_grad_norm_(model.parameters(), 1e-3)))
        optimizer.step()
    assert norms[0] != norms[0] and norms[1] > 1e-3  # the norm of the step before, which the servers found


def test_losses_are_seen_unscaled_and_private_ones_not(job):
    here = job()
    model = mlp()
    model, _optimizer = tt.prepare(model, sgd(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    x, y = next(iter(loader()))
    loss = cross_entropy(model, x, y)
    scaler.scale(loss).backward()
    with tt.local():
        cross_entropy(model, x, y).backward()
    assert here.context.worker.tally.loss_sum == pytest.approx(float(loss.detach()))


# --- the final file ----------------------------------------------------------------------------------------------


def test_tied_weights_are_saved_once_and_load_by_the_files_own_library(tmp_path):
    def tied():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model, fresh = tied(), tied()
    save_final(describe_model(model), tmp_path / "f.safetensors")
    assert load_model(fresh, tmp_path / "f.safetensors") == (set(), [])
    assert torch.equal(fresh[1].weight, model[1].weight)
    with safe_open(tmp_path / "f.safetensors", "pt") as file:
        assert list(file.keys()) == ["0.weight"]
        assert file.metadata()["tied"] == '{"0.weight": ["1.weight"]}'


TWO = ("Adam", "AdamW", "Adamax", "Adadelta", "NAdam", "RAdam", "Rprop")
FACTORS = {"SGD": 0, "Adagrad": 1, **dict.fromkeys(TWO, 2)}


def test_the_plan_knows_what_state_an_optimizer_keeps():
    model = mlp()
    assert state_factor(sgd(model)) == 1
    assert {name: state_factor(getattr(torch.optim, name)(model.parameters())) for name in FACTORS} == FACTORS
    assert state_factor(torch.optim.Muon([nn.Parameter(torch.zeros(3, 4))], lr=0.1)) == 1, "it takes only matrices"
