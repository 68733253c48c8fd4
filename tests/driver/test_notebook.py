"""What a learner meets: cells in a real kernel."""

from __future__ import annotations

import base64
import json
import os
import re

import psutil
import pytest

from tests.kernel import Kernel, started
from tests.processes import wait_until_gone


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("notebook")


@pytest.fixture(scope="module")
def kernel(folder):
    with started(folder) as kernel:
        cell = kernel.run(
            "import labkit as lk\n"
            "from time import sleep as worker_rest\n"
            "machine = lk.setup()"
        )
        assert cell.error is None
        assert "<table>" in cell.displays[0]["text/html"]
        yield kernel


def value(kernel: Kernel, expression: str):
    cell = kernel.run(f"import json; print(json.dumps({expression}))")
    assert cell.error is None, "\n".join(cell.error)
    return json.loads(cell.stdout.splitlines()[-1])


def test_functions_classes_and_modules_of_a_notebook_reach_the_ranks(kernel, folder):
    (folder / "helpers.py").write_text("def triple(x):\n    return 3 * x\n")
    kernel.run("class Scale:\n    def __init__(self, by):\n        self.by = by")
    kernel.run("config = {'by': 2}\nsquare = lambda x: x * x")
    kernel.run("from helpers import triple")
    kernel.run(
        "def fn(worker):\n"
        "    return Scale(config['by']), triple(square(worker.rank))\n"
        "run = lk.launch(fn, ranks=3, live=False)"
    )
    assert value(kernel, "[run.results[r][1] for r in range(3)]") == [0, 3, 12]
    assert value(kernel, "isinstance(run.results[2][0], Scale)") is True


def test_other_cells_are_not_run_again_in_ranks(kernel, folder):
    kernel.run("open('executed', 'a').write('x')")
    cell = kernel.run("lk.launch(lambda worker: 1, ranks=2, live=False)")
    assert cell.error is None
    assert (folder / "executed").read_text() == "x"


def test_printed_lines_are_in_the_cell_that_launched(kernel):
    for _ in range(2):
        cell = kernel.run(
            "def talk(worker):\n"
            "    print('hello from', worker.rank)\n"
            "run = lk.launch(talk, ranks=2)"
        )
        lines = sorted(cell.stdout.splitlines())
        assert lines == ["[rank 0] hello from 0", "[rank 1] hello from 1"]
        assert cell.stderr == ""


def test_an_error_shows_the_cells_own_line_and_nothing_of_labkit(kernel):
    source = (
        "def helper(x):\n"
        "    return x / 0\n"
        "\n"
        "def train(worker):\n"
        "    worker.log(loss=1.0)\n"
        "    if worker.rank == 1:\n"
        "        helper(worker.rank)\n"
        "    import torch.distributed as dist\n"
        "    dist.barrier()\n"
        "\n"
        "lk.launch(train, ranks=2)"
    )
    cell = kernel.run(source)
    number = value(kernel, "len(In)") - 2
    text = "\n".join(cell.error)
    assert cell.error[0] == "Traceback (most recent call last):"
    assert f'File "Cell In[{number}]", line 7, in train' in text
    assert f'File "Cell In[{number}]", line 2, in helper' in text
    assert "    return x / 0" in text
    assert "ZeroDivisionError: division by zero" in text
    assert "rank 1 failed first (after step 0); rank 0 was stopped because" in text
    assert "labkit/" not in text


def test_the_live_figure_grows_and_its_last_state_is_a_picture(kernel):
    cell = kernel.run(
        "def train(worker):\n"
        "    for step in range(300):\n"
        "        worker.log(loss=1 / (1 + step), samples=1)\n"
        "        worker_rest(0.005)\n"
        "run = lk.launch(train, ranks=2)"
    )
    assert cell.error is None
    (first,) = cell.displays
    assert len(cell.updates) >= 3
    for bundle in (first, *cell.updates):
        assert bundle["text/plain"] == first["text/plain"]
        assert base64.b64decode(bundle["image/png"]).startswith(b"\x89PNG")
    sizes = [len(bundle["image/png"]) for bundle in cell.updates]
    assert sizes[-1] > sizes[0]


def test_start_leaves_the_kernel_free_and_draws_under_its_own_cell(kernel):
    started_cell = kernel.send(
        "def train(worker):\n"
        "    print('line of the run')\n"
        "    for step in range(100):\n"
        "        worker.log(loss=step)\n"
        "        worker_rest(0.01)\n"
        "run = lk.start(train, ranks=2)"
    )
    first = kernel.collect(started_cell)
    assert first.error is None
    other = kernel.run("print('free')\nrun.wait().status")
    assert other.stdout == "free\n"
    assert other.result == "'finished'"
    assert other.displays == []


def test_a_started_run_that_fails_says_so_under_its_cell(kernel):
    request = kernel.send(
        "def fail(worker):\n    raise ValueError('own')\nrun = lk.start(fail, ranks=2)"
    )
    own = kernel.collect(request)
    assert own.error is None
    cell = kernel.run("run.monitor.ended.wait(); run.view.finish()")
    texts = [bundle.get("text/plain", "") for bundle in (*own.updates, *cell.updates)]
    assert any("ValueError: own" in text and "failed first" in text for text in texts)


def test_plot_shows_a_picture(kernel):
    request = kernel.send("lk.launch(lambda w: w.log(loss=1.0), 2, live=False).plot()")
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") != request:
            continue
        if message["msg_type"] == "execute_result":
            assert "image/png" in message["content"]["data"]
            return
        assert message["msg_type"] != "error", message["content"]


def test_await_in_a_cell_gives_the_finished_run(kernel):
    cell = kernel.run("(await lk.start(lambda w: w.rank, ranks=2)).status")
    assert cell.result == "'finished'"


ENDLESS = (
    "def endless(worker):\n"
    "    print('pid', worker.rank, __import__('os').getpid())\n"
    "    for step in range(10**9):\n"
    "        worker.log(loss=1.0)\n"
    "        worker_rest(0.01)\n"
)


def pids_in(text: str) -> list[int]:
    return [int(line.split()[-1]) for line in text.splitlines() if "pid" in line]


@pytest.mark.parametrize(
    "call", ["run = lk.launch(endless, ranks=2)", "run = await lk.start(endless, 2)"]
)
def test_the_stop_button_ends_the_run_and_keeps_the_kernel(kernel, call):
    kernel.run("kept = 42")
    request = kernel.send(ENDLESS + call)
    wait_for_step(kernel, request)
    kernel.interrupt()
    cell = kernel.collect(request)
    assert cell.error is None
    assert re.search(r"^stopped by you at step \d+$", cell.stdout, re.MULTILINE)
    assert "KeyboardInterrupt" not in cell.stdout + cell.stderr
    assert value(kernel, "[run.status, kept]") == ["stopped", 42]
    assert value(kernel, "len(run.metrics)") > 0
    assert wait_until_gone(value(kernel, "run.monitor.processes.pids")) == []
    assert value(kernel, "lk.launch(lambda w: w.rank, ranks=2).results[1]") == 1


def wait_for_step(kernel: Kernel, request: str) -> None:
    """Until a figure with something in it has been drawn."""
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if message["parent_header"].get("msg_id") == request:
            assert message["msg_type"] != "error", message["content"]
            if message["msg_type"] == "update_display_data":
                return


def test_a_second_press_raises_and_leaves_nothing(kernel):
    request = kernel.send(ENDLESS + "run = lk.launch(endless, ranks=2)")
    wait_for_step(kernel, request)
    kernel.interrupt()
    kernel.interrupt()
    cell = kernel.collect(request)
    if cell.error is not None:  # the second came before the run had ended
        assert "KeyboardInterrupt" in "\n".join(cell.error)
    current = "lk.driver.launcher.LAUNCHER.current"
    assert value(kernel, f"{current}.monitor.ended.wait(5)") is True
    assert value(kernel, f"{current}.status") == "stopped"
    assert wait_until_gone(value(kernel, f"{current}.monitor.processes.pids")) == []
    assert value(kernel, "lk.launch(lambda w: w.rank, ranks=2).results[1]") == 1


def test_the_stop_button_works_while_the_nursery_imports(folder):
    with started(folder) as kernel:
        kernel.run("import labkit as lk, time")
        request = kernel.send(
            "print('starting')\n"
            "run = lk.launch(lambda worker: time.sleep(600), ranks=2)\n"
        )
        kernel.collect(request, until="starting")
        while not children(kernel):
            continue  # until the nursery is there
        kernel.interrupt()
        cell = kernel.collect(request)
        assert cell.error is None, cell.error
        assert "stopped by you before the first step" in cell.stdout
        assert value(kernel, "lk.launch(lambda w: w.rank, ranks=2).results[1]") == 1


def children(kernel: Kernel) -> list[int]:
    pid = kernel.manager.provisioner.pid
    return [child.pid for child in psutil.Process(pid).children()]


def test_the_stop_button_while_a_result_is_sent(kernel):
    request = kernel.send(
        "def give(worker):\n"
        "    import numpy as np\n"
        "    print('sending')\n"
        "    return np.ones(50_000_000)\n"
        "run = lk.launch(give, ranks=2)"
    )
    kernel.collect(request, until="sending")
    kernel.interrupt()
    cell = kernel.collect(request)
    assert cell.error is None, cell.error
    assert value(kernel, "run.status") in ("stopped", "finished")
    whole = "all(run.results[rank].sum() == 50_000_000 for rank in run.results)"
    assert value(kernel, whole) is True
    assert value(kernel, "lk.launch(lambda w: w.rank, ranks=2).results[1]") == 1


CLICK = (
    "import ipywidgets, threading\n"
    "button, = [w for w in ipywidgets.Widget.widgets.values()\n"
    "           if isinstance(w, ipywidgets.Button)]\n"
    "timer = threading.Timer(0.1, button.click)\n"
    "timer.start()\n"
)


def test_the_button_of_start_ends_the_run_also_while_a_cell_awaits_it(kernel):
    first = kernel.run(ENDLESS + "run = lk.start(endless, ranks=2)")
    view = "application/vnd.jupyter.widget-view+json"
    assert [view in bundle for bundle in first.displays].count(True) == 1
    cell = kernel.run(CLICK + "await run")
    assert cell.error is None, cell.error
    assert "stopped by you" in cell.stdout
    assert value(kernel, "run.status") == "stopped"
    left = "[w for w in ipywidgets.Widget.widgets.values() if hasattr(w, 'click')]"
    assert value(kernel, f"len({left})") == 0


def test_a_second_launch_is_refused_in_the_next_cell(kernel):
    kernel.run(ENDLESS + "run = lk.start(endless, ranks=2)")
    cell = kernel.run("lk.launch(endless, ranks=2)")
    assert "endless is still running (2 ranks" in cell.error[-1]
    kernel.run("run.stop(); run.wait()")


def test_a_run_outlives_its_kernel(kernel, folder):
    kernel.run("def talk(worker):\n    print('hello from', worker.rank)")
    path = value(kernel, "str(lk.launch(talk, ranks=2, live=False).path)")
    with started(folder) as other:
        other.run(f"import labkit as lk\nrun = lk.open_run({path!r})")
        assert value(other, "[run.status, run.logs(1)]") == [
            "finished",
            "hello from 1\n",
        ]


def test_ranks_end_when_the_kernel_is_restarted(folder):
    with started(folder) as kernel:
        kernel.run("import labkit as lk\nfrom time import sleep as worker_rest")
        kernel.run(ENDLESS + "run = lk.start(endless, ranks=2)")
        while not (pids := value(kernel, "run.monitor.processes.pids")):
            continue  # the nursery is still importing
        pids.append(value(kernel, "run.monitor.processes.nursery.process.pid"))
        kernel.manager.restart_kernel(now=True)
        assert wait_until_gone(pids) == []


def test_two_notebooks_run_at_once(kernel, folder):
    with started(folder) as other:
        other.run("import labkit as lk\nfrom time import sleep as worker_rest")
        for one in (kernel, other):
            one.run(ENDLESS + "run = lk.start(endless, ranks=2)")
        for one in (kernel, other):
            one.run("while run.telemetry.last_step(1) is None: worker_rest(0.01)")
            assert value(one, "run.status") == "running"
        for one in (kernel, other):
            one.run("run.stop()")
            assert value(one, "run.wait().status") == "stopped"


def test_ranks_end_when_the_kernel_is_shut_down(folder):
    with started(folder) as kernel:
        kernel.run("import labkit as lk\nfrom time import sleep as worker_rest")
        kernel.run(ENDLESS + "run = lk.start(endless, ranks=2)")
        while not (pids := value(kernel, "run.monitor.processes.pids")):
            continue
        pids.append(value(kernel, "run.monitor.processes.nursery.process.pid"))
        kernel.manager.shutdown_kernel()
        assert wait_until_gone(pids) == []


def test_what_a_started_run_prints_stays_under_its_own_cell(kernel, folder):
    kernel.run(
        "def talk(worker):\n"
        "    import os\n"
        "    for number in range(3):\n"
        "        while not os.path.exists(f'go-{number}'): worker_rest(0.01)\n"
        "        print('said', number)\n"
    )
    request = kernel.send("run = lk.start(talk, ranks=1)")
    own = kernel.collect(request)
    for number in range(3):
        (folder / f"go-{number}").touch()
        cell = kernel.run(f"print('cell {number}')\nworker_rest(0.3)")
        assert cell.stdout == f"cell {number}\n"
        # an update names the place that it is for, which is in the first cell
        assert cell.displays == []
    assert len(own.displays) == 3  # the Stop button, the figure, the lines
    after = kernel.run("run.wait().logs(0)")
    assert after.result == repr("said 0\nsaid 1\nsaid 2\n")
    assert own.error is None


def test_works_after_parallel_maths_in_the_kernel(kernel):
    kernel.run(
        "import torch, numpy as np\n"
        "torch.randn(800, 800) @ torch.randn(800, 800)\n"
        "np.linalg.inv(np.random.rand(300, 300))"
    )
    assert value(kernel, "lk.launch(lambda w: w.rank, ranks=2).results[1]") == 1


def test_the_kernels_environment_is_unchanged(kernel):
    kernel.run("import os; before = dict(os.environ)")
    kernel.run("lk.launch(lambda worker: os.environ.update(X='1'), ranks=2)")
    assert value(kernel, "before == dict(os.environ)") is True
    assert "X" not in os.environ


# Persistent ranks


def test_a_ranks_cell_shows_each_rank_in_its_own_place(kernel):
    kernel.run("ranks = lk.Ranks(3)")
    cell = kernel.run(
        "%%ranks\nx = 10 * worker.rank\nprint('here', worker.rank)\nx + 1"
    )
    assert cell.error is None, cell.error
    assert last_texts(cell) == [
        f"rank {rank}\n  here {rank}\n  Out: {10 * rank + 1}" for rank in range(3)
    ]
    again = kernel.run("%%ranks 0,2\nt = torch.tensor(x)\nt")
    assert last_texts(again) == [
        "rank 0\n  Out: tensor(0)",
        "rank 2\n  Out: tensor(20)",
    ]
    keeps = value(kernel, "ranks.run(lambda worker: worker.state.x).results[2]")
    assert keeps == 20
    kernel.run("ranks.close()")


def last_texts(cell) -> list[str]:
    return sorted(
        {bundle["text/plain"].splitlines()[0]: bundle["text/plain"]
         for bundle in cell.updates}.values()
    )  # fmt: skip


def test_an_error_in_a_ranks_cell_shows_its_line_and_keeps_the_ranks(kernel):
    kernel.run("ranks = lk.Ranks(2)")
    cell = kernel.run("%%ranks\ny = 1\n1 / worker.rank")
    number = value(kernel, "len(In)") - 2
    text = "\n".join(cell.error)
    assert f'File "Cell In[{number}]", line 3' in text
    assert "ZeroDivisionError" in text
    assert "labkit/" not in text
    assert "the ranks and their state were kept" in cell.stdout
    assert last_texts(kernel.run("%%ranks 0\ny"))[0] == "rank 0\n  Out: 1"
    kernel.run("ranks.close()")


def test_the_stop_button_in_a_ranks_cell_keeps_the_ranks(kernel):
    kernel.run("ranks = lk.Ranks(2)")
    kernel.run("%%ranks\nkept = 7")
    request = kernel.send(
        "%%ranks\nimport time\nprint('go')\nwhile True: time.sleep(0.01)"
    )
    while True:
        message = kernel.client.get_iopub_msg(timeout=60)
        if "go" in message["content"].get("data", {}).get("text/plain", ""):
            break
    kernel.interrupt()
    cell = kernel.collect(request)
    assert cell.error is None, cell.error
    assert "stopped by you" in cell.stdout
    assert "kept" in cell.stdout
    assert last_texts(kernel.run("%%ranks 1\nkept"))[0] == "rank 1\n  Out: 7"
    kernel.run("ranks.close()")


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("%%ranks 0,5\n1", "give ranks from 0 to 1"),
        ("%%ranks all\n1", "give ranks from 0 to 1"),
        ("%%ranks\nx = (", "SyntaxError"),
    ],
)
def test_a_wrong_ranks_cell_is_refused_in_the_kernel(kernel, cell, words):
    kernel.run("ranks = lk.Ranks(2)")
    assert words in "\n".join(kernel.run(cell).error)
    kernel.run("ranks.close()")


def test_a_ranks_cell_without_ranks_says_what_to_do(kernel):
    kernel.run("%load_ext labkit")
    assert "run `ranks = lk.Ranks(4)` first" in kernel.run("%%ranks\n1").error[-1]
