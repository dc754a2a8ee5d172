"""tools/grid_search.py search: what it takes, prints and writes, and that the training program accepts its best."""

import json
import re
import shlex
import subprocess
import sys
from html import unescape

import pytest

from megatron.commands import grid_search as tool
from megatron.commands.grid_search import search as search_command
from megatron.commands.grid_search import search_inputs as inputs
from megatron.planner.job.devices import DEVICES
from megatron.trainer.arguments import Platform
from megatron.trainer.plan.command import Job
from tests.commands.in_process import ROOT, without
from tests.commands.search_argv import CLUSTER, GPT, QUICK, SCRIPT

SUBCOMMAND = ("search",)

TOOL = ROOT / "tools" / "grid_search.py"

MODERN = """
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 128 --swiglu --disable-bias-linear
    --group-query-attention --num-query-groups 4 --position-embedding-type rope --clip-grad 0 --bf16
    --normalization RMSNorm --untie-embeddings-and-output-weights --tensor-model-parallel-size 2 --data-path 1 a 2 b
"""


def test_a_table_and_json(run):
    """Plain text where the output is no terminal; with --json one object with the same best."""
    status, out, err = run(*CLUSTER, *GPT, *QUICK, "--top", 3)
    assert status == 0 and out.isascii() and "\x1b" not in out and "precision" in err
    lines = out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("the fastest (~"))
    assert [line.split()[0] for line in lines[start + 1 : start + 5]] == ["rank", "1", "2", "3"]
    assert "why choices were rejected" in out
    status, out, _ = run(*CLUSTER, *GPT, *QUICK, "--top", 3, "--json")
    content = json.loads(out)
    assert status == 0 and [each["rank"] for each in content["best"]] == [1, 2, 3]
    assert lines[start + 2].split()[1] == content["best"][0]["schedule"]
    assert content["num_kept"] > 3 < content["num_rejected"]


def test_a_size_that_is_named_twice_is_tried_once(run):
    """Among the sizes that context and expert parallelism are to have, too."""
    few = [*CLUSTER, *GPT, "--schedules", "flush", "--tensor", 1, "--pipeline", 2, "--simulate", 1, "--json"]
    moe = ["--num-experts", 4, "--moe-router-topk", 2]
    for more in (["--context-parallel-sizes"], [*moe, "--expert-parallel-sizes"]):
        once, twice = (json.loads(run(*few, *more, sizes)[1]) for sizes in ("1,2", "1,2,1"))
        assert once["num_kept"] == twice["num_kept"] > 0 and once["num_rejected"] == twice["num_rejected"]


@pytest.mark.full
def test_2bw_predicts_where_that_is_asked_for(run, tmp_path):
    """The configurations without, but for those that leave no room for copies; no faster, and with the flag in the
    script. Without it a note names the flag, with it another says what a prediction is made from."""
    common = [*CLUSTER, *GPT, "--schedules", "flush,2bw", "--recompute", "none", "--distributed-optimizer", "no"]
    plain, predicted = (run(*common, *more, "--json", "--top", 1000) for more in ([], ["--2bw-provisional", "stage"]))
    assert "2bw-provisional" not in predicted[2]
    before, after = (json.loads(out) for _, out, _ in (plain, predicted))
    assert "2bw-provisional stage" in before["notes"][0] and "prediction" in after["notes"][0]
    modes = {(each["schedule"], each["provisional"]) for each in after["best"]}
    assert modes == {("flush", "off"), ("2bw", "stage")}
    names = ("schedule", "tensor", "pipeline", "data", "micro_batch_size", "rank_mapping")
    found = [{tuple(str(each[name]) for name in names): each for each in result["best"]} for result in (before, after)]
    assert found[1].keys() <= found[0].keys()
    assert all(found[0][key]["spare_gib"] < 2.0 for key in found[0].keys() - found[1].keys())
    seconds = [{key: each["iteration_seconds"] for key, each in result.items()} for result in found]
    for key in seconds[1]:
        assert seconds[1][key] > seconds[0][key] if key[0] == "2bw" else seconds[1][key] == seconds[0][key]
    only = [*CLUSTER, *GPT, *QUICK, "--schedules", "2bw", "--pipeline", "2", "--2bw-provisional", "uniform"]
    status, out, _ = run(*only, "--2bw-provisional-microbatches", 1, "--output", tmp_path / "plan")
    assert status == 0 and "2bw (uniform)" in out and "note: with 2bw" not in out and "note: 2bw with" in out
    script = (tmp_path / "plan" / "best.sh").read_text()
    assert "--2bw-provisional uniform --2bw-provisional-microbatches 1" in script


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedules", ["2bw", "flush,2bw", "flush"])
def test_the_delay_of_weights_is_said_where_it_counts(run, tmp_path, schedules):
    """What is printed and the page say it where 2bw is listed, the script where it starts 2bw; else nothing does."""
    argv = ["--schedules", schedules, "--tensor", "1", "--simulate", 1, "--output", tmp_path]
    status, out, _ = run(*CLUSTER, *GPT, *argv)
    assert status == 0
    script, page = (unescape((tmp_path / name).read_text()) for name in ("best.sh", "report.html"))
    starts_2bw = "SCHEDULE:-2bw}" in script
    head = " ".join(line.removeprefix("# ") for line in script.splitlines())
    cost = (
        "ith 2bw, gradients are computed at weights from before the last update: at a learning rate at which flush is"
    )
    page = page.replace(f"<pre>{script}</pre>", "")
    targets = re.findall('href="([^"]*docs/convergence.md)"', page)
    assert targets == [(ROOT / "docs" / "convergence.md").as_uri()] * ("2bw" in schedules)
    page = re.sub(r'href="[^"]*"', "", page)
    assert [cost in text for text in (out, page, head)] == ["2bw" in schedules, "2bw" in schedules, starts_2bw]
    assert [text.count("docs/convergence.md") for text in (out, page, head)] == [
        int("2bw" in schedules), int("2bw" in schedules), int(starts_2bw),
    ]  # fmt: skip
    assert starts_2bw or schedules != "2bw"


def test_progress_is_for_terminals(run, monkeypatch):
    """A bar on standard error while that is a terminal; standard output stays what it is."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    status, out, err = run(*CLUSTER, *GPT, *QUICK, "--json")
    assert status == 0 and json.loads(out)["best"]
    assert "configurations" in err and "simulations" in err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    assert "configurations" not in run(*CLUSTER, *GPT, *QUICK, "--json")[2]


def test_files(run, tmp_path):
    """--output makes a folder with everything; the tables and the page agree with what is printed."""
    status, out, err = run(*CLUSTER, *GPT, *QUICK, "--json", "--output", tmp_path / "plan")
    assert status == 0
    names = ["best.sh", "configurations.csv", "configurations.jsonl", "report.html", "throughput_memory.png"]
    assert sorted(path.name for path in (tmp_path / "plan").iterdir()) == names
    assert all(name in err for name in names)
    rows = [json.loads(line) for line in (tmp_path / "plan" / "configurations.jsonl").read_text().splitlines()]
    content = json.loads(out)
    assert len(rows) == content["num_kept"] + content["num_rejected"]
    best = {name: value for name, value in rows[0].items() if name != "memory_gib_by_rank"}
    assert best == content["best"][0]
    assert "<svg" in (tmp_path / "plan" / "report.html").read_text()


@pytest.mark.full
def test_it_starts_without_torch(tmp_path):
    """Neither the search nor its files import torch or megatron.core, nor scipy, which fits constants alone."""
    without("scipy", TOOL, "search", *CLUSTER, *GPT, *QUICK, "--output", tmp_path, cwd=tmp_path)


def test_every_way_to_name_a_model(run, tmp_path):
    """A script, YAML, a file of flags and flags give the same search; flags of the command line come last."""
    script, document, file = tmp_path / "train.sh", tmp_path / "model.yaml", tmp_path / "model.flags"
    script.write_text(SCRIPT)
    document.write_text(
        "architecture: bert\nnum_layers: 24\nhidden-size: 1024\nnum_attention_heads: 16\nseq_length: 512\n"
        "max_position_embeddings: 512\nfp16: true\nlr: 1.0e-4\ntrain_iters: 1000\nglobal_batch_size: 256\n"
    )
    flags = ["--architecture", "bert", "--num-layers", 24, "--hidden-size", 1024, "--num-attention-heads", 16,
             "--seq-length", 512, "--fp16", "--global-batch-size", 256]  # fmt: skip
    file.write_text("\n".join(map(str, ["# a BERT", *flags])))
    found = []
    for model in (["--model-script", script], ["--model-yaml", document], [f"@{file}"], flags):
        status, out, err = run(*CLUSTER, *QUICK, "--json", *model)
        assert status == 0
        found.append(json.loads(out) | {"seconds": None})
        if model[0] == "--model-script":
            assert "--tensor-model-parallel-size 2, --recompute-activations" in err
    assert found[0] == found[1] == found[2] == found[3]
    status, out, _ = run(*CLUSTER, *QUICK, "--json", "--model-script", script, "--global-batch-size", 128)
    assert json.loads(out)["best"][0]["global_batch_size"] == 128


@pytest.mark.full
def test_clusters_that_come_along(run):
    """All of them are named, load, and can be made larger; nodes and network of a file can be changed."""
    wanted = {*DEVICES, "cpu"}
    assert set(inputs.cluster_names()) == wanted
    small = ["--num-layers", 8, "--hidden-size", 256, "--num-attention-heads", 8, "--seq-length", 128, "--vocab-size",
             1000, "--global-batch-size", 16, "--schedules", "flush", "--tensor", 2, "--pipeline", 2, "--simulate", 1,
             "--json"]  # fmt: skip
    for name in sorted(wanted):
        status, out, _ = run(*small, "--cluster", name, "--nodes", 2, "--gpus-per-node", 4, "--network", 5)
        best = json.loads(out)["best"][0]
        assert status == 0 and best["tensor"] * best["pipeline"] * best["data"] == 8


TWO = "bandwidth: {between_nodes: 100}"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("gpu: a100\nnodes: 1", "'a100' is no GPU that is known; choose from A100-80, "),
        ("gpu: A100-80\nnodes: 6", "there are several nodes; give bandwidth.between_nodes, "),
        ("gpu: A100-80", "nodes is missing; see docs/grid_search.md"),
        ("nodes: 1", "gpu is missing; see docs/grid_search.md"),
        ("gpu: A100-80\nnodes: '6'", "nodes should be a valid integer, not '6'; see"),
        ("gpu: A100-80\nnodes: 0", "nodes should be greater than or equal to 1, not 0; see"),
        ("gpu: A100-80\nnodes: 2\nbandwith: 3", "bandwith is not known; see"),
        ("gpu: A100-80\nnodes: 2\nbandwidth: 100", "bandwidth is no mapping; see"),
        ("gpu: A100-80\nnodes: 2\nbandwidth: {between_nodes: -1}",
         "bandwidth.between_nodes should be greater than 0, not -1; see"),
        ("gpu: A100-80\nnodes: 2\nbandwidth: {between_nodes: fast}",
         "bandwidth.between_nodes should be a valid number, not 'fast'; see"),
        (f"gpu: A100-80\nnodes: [{{name: a, gpus: 8}}, {{name: a, gpus: 8}}]\n{TWO}", "two nodes are called a; give"),
        (f"gpu: A100-80\nnodes: [{{name: a, gpus: 8}}, {{nam: b, gpus: 8}}]\n{TWO}", "nodes.1.name is missing; see"),
        (f"gpu: A100-80\nnodes: [{{name: a, gpus: 8}}, {{name: b, gpus: 4}}]\n{TWO}", "8 and 4 GPUs, and a search"),
        ("gpu: A100-80\nnodes: 2\nbandwith: 3", "the nearest that is known is bandwidth"),
        ("gpu: A100-80\nnodes: 99999999", "nodes should be less than or equal to 65536, not 99999999; see"),
        ("gpu: A100-80\nnodes: true", "nodes should be a valid integer, not True; see"),
        ("gpu: A100-80\nnodes: 1\nmemory_gib: true", "memory_gib should be a valid number, not True; see"),
        ("gpu: A100-80\nnodes: 1\nfsdp: true", "fsdp is not known; see"),
        ("gpu: H200-NVL\nnodes: 1", "'H200-NVL' is the NVL edition, and the rates that are known are those of "
         "H200 (SXM); give gpu H200 with memory_gib, peak_teraflops, memory_bandwidth and bandwidth.within_node"),
        ("gpu: A100-PCIe\nnodes: 1", "'A100-PCIe' is no GPU that is known; choose from A100-PCIe-80, A100-PCIe-40"),
        ("gpu: GH200\nnodes: 1", "those of H200 (SXM); give gpu H200 with"),
        ("gpu: A100-80\nnodes: 1\nprice_per_gpu_hour: 1.0e+300",
         "price_per_gpu_hour should be less than or equal to 1000000, not 1e+300; see"),
        ("gpu: A100-80\nnodes: 1\ngpus_per_host: 3", "gpus_per_host 3 does not divide the 8 GPUs of a node; give"),
        ("[" * 100_000, "brackets are nested too deeply; write YAML or JSON"),
        ("", "the file is no mapping; see"),
        ("- 1", "the file is no mapping; see"),
        ("gpu: [A100-80", "line 1, column 14: expected ',' or ']'"),
    ],
)  # fmt: skip
def test_a_cluster_that_is_wrong(run, tmp_path, text, reason):
    """One sentence names the file, the field and what to do."""
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    status, _, err = run(*GPT, "--cluster", path)
    message = err.splitlines()[-1]
    assert status == 1 and message.startswith(f"error: {path}") and reason in message


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--global-batch-size=-1"], "error: --global-batch-size -1 is below 1; give the sequences of a batch"),
        (["--global-batch-size", "0"], "error: --global-batch-size 0 is below 1; give the sequences of a batch"),
        (["--global-batch-size", "9" * 20],
         f"error: --global-batch-size {'9' * 20} is more than any batch has; give 10000000 or less"),
        (["--max-safe-batch", "10000001"],
         "error: --max-safe-batch 10000001 is more than any batch has; give 10000000 or less"),
        (["--nodes", "99999999"], "error: --nodes 99999999 is more than any cluster has; give 65536 or less"),
        (["--gpus-per-node", "65537"], "error: --gpus-per-node 65537 is more than any cluster has; give 65536 or less"),
        (["--price-per-gpu-hour", "1e308"],
         "error: --price-per-gpu-hour 1e+308 is more than any GPU costs; give 1000000 or less"),
        (["--expert-parallel-sizes", "2,4"], "error: --expert-parallel-sizes 2,4 share experts, and the model has "
         "none; give --num-experts, or leave --expert-parallel-sizes out"),
    ],
)  # fmt: skip
def test_numbers_that_no_job_has(run, arguments, reason):
    """The last that is given counts."""
    status, _, err = run(*GPT, "--cluster", "A100-80", *arguments)
    assert status == 1 and err.splitlines()[-1] == reason


@pytest.mark.sample(1)
@pytest.mark.parametrize("flag", ["--predict-from", "--calibrated-on"])
def test_brackets_without_an_end(run, tmp_path, flag):
    path = tmp_path / "deep.json"
    path.write_text("[" * 100_000 + "]" * 100_000)
    status, _, err = run(*GPT, "--cluster", "A100-80", flag, path)
    assert status == 1 and "brackets are nested too deeply; write" in err and len(err.splitlines()[-1]) < 300


def test_nodes_that_a_file_does_not_connect(run, tmp_path):
    """More nodes than the file has need a network."""
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: A100-80\nnodes: 1")
    status, _, err = run(*GPT, "--cluster", path, "--nodes", 4)
    assert status == 1 and "says nothing of the network between 4 nodes; give --network" in err
    assert run(*GPT, *QUICK, "--cluster", path, "--nodes", 2, "--network", 50)[0] == 0


@pytest.mark.full
def test_a_part_of_each_node_has_that_part_of_the_network(run):
    """Half of the GPUs have half of the adapters, as a note says, and the prices are those of that rate by hand. A rate
    that is given stays, and is no matter for a note; nor is one between nodes where there is a single one."""
    argv = [*GPT, *QUICK, "--cluster", "A100-80", "--gpus-per-node", 4, "--json"]

    def best(*more):
        status, out, err = run(*argv, *more)
        assert status == 0, err
        found = json.loads(out)
        return found["best"][0], [note for note in found["notes"] if "--network" in note]

    half, notes = best("--nodes", 4)
    assert notes == [
        "4 of a node's 8 GPUs are assumed to have their share of its network, 50 of 100 GB/s; --network changes that"
    ]
    assert best("--nodes", 4, "--network", 50) == (half, [])
    whole, notes = best("--nodes", 4, "--network", 100)
    assert whole["iteration_seconds"] < half["iteration_seconds"] and not notes
    assert best()[1] == []


def test_flags_of_any_model_survive():
    """A job keeps every flag that a configuration does not decide, and the program reads the same from it."""
    argv = MODERN.split()
    gpu = Platform(is_cuda=True, has_transformer_engine=True, has_apex=True, has_deep_ep=True)
    job = Job.read(argv, architecture="gpt", platform=gpu)
    assert job.dropped == ("--tensor-model-parallel-size 2",) and not job.clips_gradients
    again = Job.read(job.argv, architecture="gpt", platform=gpu)
    assert again.argv == job.argv and again.shape(4) == job.shape(4)
    shape = job.shape(4)
    assert shape.gated and not shape.linear_biases and shape.num_query_groups == 4 and shape.num_positions == 0
    assert shape.vocabulary_size == 50688  # 50257 up to a multiple of 128 x 4


@pytest.mark.parametrize(
    ("argv", "status", "reason"),
    [
        ([*CLUSTER, *GPT, "--schedules", "zigzag"], 2, "'zigzag' is none of gpipe, "),
        ([*CLUSTER, *GPT, "--num-lyers", "3"], 1, "--num-lyers is not a known flag; did you mean --num-layers?"),
        ([*CLUSTER, *GPT[:4]], 1, "--num-attention-heads, --seq-length"),
        ([*CLUSTER, *GPT[:-2]], 1, "give --global-batch-size, or --max-safe-batch"),
        (["--cluster", "Z9", *GPT], 1, "neither a file nor a known cluster; give a file, or one of A100-40"),
        ([*GPT], 2, "--cluster"),
        ([*CLUSTER, *GPT, "--model-script", "nowhere.sh"], 1, "nowhere.sh cannot be read"),
        ([*CLUSTER, *GPT, "--fp8-format", "hybrid"], 1, "--fp8-format hybrid needs the layers of --transformer-impl"),
        ([*CLUSTER, *GPT, "--hidden-size", "16384"], 1, "can run; the nearest (tensor "),
        ([*CLUSTER, *GPT, "--max-safe-batch", "8"], 1, "maximum safe batch of 8 sequences is below"),
        ([*CLUSTER, *GPT, "--bf16"], 1, "V100-16 has no units for bfloat16; give --precision fp16"),
        ([*CLUSTER, *GPT, "--precision", "bf16"], 1, "V100-16 has no units for bfloat16; give --precision fp16"),
    ],
)
def test_refusals(run, argv, status, reason):
    """What is wrong is one sentence, and the exit status says whose fault it is."""
    found, _, err = run(*argv)
    assert found == status and reason in err


@pytest.mark.parametrize("program", ["pretrain_vision_classify.py", "finetune_bert.py", "pretrain_t5.py"])
def test_programs_that_are_not_searched(run, tmp_path, program):
    """A script of those that tell classes, or of a T5, is refused by name, and so are their flags."""
    (tmp_path / "job.sh").write_text(f"torchrun {program} --num-layers 4 --num-classes 3\n")
    status, _, err = run(*CLUSTER, "--model-script", tmp_path / "job.sh")
    assert status == 1 and f"runs {program}, whose models are neither searched nor profiled; check and price" in err
    status, _, err = run(*CLUSTER, *GPT, "--num-classes", "3")
    assert status == 1 and "--num-classes belongs to pretrain_vision_classify.py and finetune_bert.py" in err
    status, _, err = run(*CLUSTER, *GPT, "--decoder-num-layers", "3")
    assert status == 1 and "--decoder-num-layers belongs to pretrain_t5.py" in err


def test_output_that_cannot_be_written_is_said_before_the_search(run, tmp_path, monkeypatch):
    """And not after it, when its result would be lost. A folder is made for a result, and for no other end."""
    plan = tmp_path / "plan"
    assert run(*CLUSTER, *GPT, "--objective", "cost", "--output", plan)[0] == 1 and not plan.exists()
    monkeypatch.setattr(search_command, "search", lambda *arguments, **options: pytest.fail("it has searched"))
    (tmp_path / "file").write_text("")
    for name in ("file", "file/plan"):
        status, _, err = run(*CLUSTER, *GPT, "--output", tmp_path / name)
        reason = f"error: --output {tmp_path / name} cannot be written; name a folder of yours"
        assert status == 1 and err.splitlines()[-1] == reason


def test_one_of_each_is_no_plural(run):
    """Nor a cluster without a name the folder that one stands in."""
    flags = [*GPT, *QUICK, "--tensor", 1, "--pipeline", 1, "--microbatches", 1, "--recompute", "none"]
    one = ["--cluster", "A100-80", "--gpus-per-node", 1, *flags, "--schedules"]
    assert run(*one, "flush", "--distributed-optimizer", "no")[1].startswith("1 configuration fits, ")
    status, _, err = run(*one, "bpipe")
    assert status == 1 and "\nerror: the only choice cannot run; the first is rejected since on one stage" in err
    assert "error: --cluster '' is neither a file nor a known cluster" in run("--cluster", "", *GPT)[2]


def test_a_reader_that_has_seen_enough_is_no_error():
    """`search ... | head -1` ends quietly."""
    command = [sys.executable, TOOL, "search", *CLUSTER, *GPT, *QUICK]
    line = f"{shlex.join(map(str, command))} 2>/dev/null | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.isdigit()


def test_flags_that_are_taken_are_said(run):
    """Those that a search sets aside, those that change nothing here, which precision goes first, and whose vocabulary
    is taken; nothing of these where nothing of it is given."""
    flags = ["--overlap-grad-reduce", "--tensor-model-parallel-size", 2, "--log-straggler", "--fp16"]
    status, _, err = run(*CLUSTER, *GPT, *QUICK, *flags, "--precision", "fp32")
    notes = [line.removeprefix("note: ") for line in err.splitlines()]
    assert status == 0 and "--precision fp32 overrides --fp16" in notes
    assert "these flags are ignored, since the search chooses their values: --tensor-model-parallel-size 2" in notes
    assert "these flags change neither training nor prediction: --overlap-grad-reduce, --log-straggler" in notes
    without = [each for each in GPT if each not in ("--vocab-size", GPT[GPT.index("--vocab-size") + 1])]
    _, _, err = run(*CLUSTER, *without, *QUICK, "--fp16")
    assert err.splitlines() == ["note: no --vocab-size was given; the embedding is taken to have GPT-2's 50257 words"]
    assert run(*CLUSTER, *GPT, *QUICK, "--fp16")[2] == ""


def test_an_interrupt_is_one_line(run, monkeypatch):
    """Ctrl-C ends a command with the status that shells expect."""

    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(search_command, "search", interrupted)
    status, out, err = run(*CLUSTER, *GPT)
    assert status == 130 and not out and err.splitlines()[-1] == "ended by SIGINT"


def test_single_precision_is_planned_at_its_own_rate(run):
    """On a V100 an eighth of that of 16 bits, and without the kernels for them."""
    best = {}
    for precision in ("fp16", "fp32"):
        _, out, _ = run("--cluster", "V100-32", *GPT, *QUICK, "--precision", precision, "--json")
        best[precision] = json.loads(out)["best"][0]
    assert best["fp32"]["iteration_seconds"] > 3 * best["fp16"]["iteration_seconds"]
    assert 0.2 < best["fp32"]["mfu"] < 1


def test_all_commands_are_named_and_one_is_loaded(capsys):
    """--help names every command; a command is loaded when it is called."""
    with pytest.raises(SystemExit):
        tool.main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert all(summary in text for summary in tool.COMMANDS.values())
    program = (
        f"import runpy, sys\nsys.argv = [{str(TOOL)!r}, 'search', '--help']\n"
        "try:\n    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit:\n    pass\n"
        "rooms = [f'megatron.commands.grid_search.{name}' in sys.modules for name in ('search', 'validate')]\n"
        "assert rooms == [True, False], rooms"
    )
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, timeout=60)


def test_a_rack_of_many_hosts(run, tmp_path):
    """Degrees know 72 linked GPUs; what starts them knows hosts of 4, whose names no optimized rank order could use."""
    small = ["--num-layers", 18, "--hidden-size", 768, "--num-attention-heads", 12, "--seq-length", 128,
             "--vocab-size", 1000, "--global-batch-size", 144, "--schedules", "flush", "--simulate", 1, "--cluster",
             "GB200"]  # fmt: skip
    status, _, err = run(*small, "--nodes", 2, "--tensor", 12, "--output", tmp_path)
    assert status == 0, err
    script = (tmp_path / "best.sh").read_text()
    assert 'GPUS_PER_NODE="${GPUS_PER_NODE:-4}"' in script and "examples/cluster/torchrun.sh" in script
    assert "num_gpus=144" in script and not (tmp_path / "topology.yaml").exists()
    status, _, err = run(*small, "--rank-mappings", "optimized")
    assert status == 1 and "--rank-mappings optimized needs a node for each host" in err


def test_less_than_a_host(run, tmp_path):
    """2 GPUs of a rack are a part of a tray of 4; 6 are neither that nor trays, which one sentence says."""
    status, _, err = run(*GPT, *QUICK, "--cluster", "GB200", "--gpus-per-node", 2, "--output", tmp_path)
    script = (tmp_path / "best.sh").read_text()
    assert status == 0, err
    assert 'GPUS_PER_NODE="${GPUS_PER_NODE:-2}"' in script and "examples/cluster/one_node.sh" in script
    status, _, err = run(*GPT, "--cluster", "GB200", "--gpus-per-node", 6)
    assert status == 1 and err.startswith("error: ") and "pydantic" not in err and err.count("\n") == 1
    assert "GB200.yaml with --gpus-per-node 6: gpus_per_host 4 does not divide the 6 GPUs of a node; give" in err


@pytest.mark.full
def test_tokens_and_a_price(run, tmp_path):
    """Days and money stand in the table, in JSON, on the page and in the head of the script; the file's price counts
    unless another one is given. Without a price there is no cost."""
    path = tmp_path / "mine.yaml"
    path.write_text("gpu: V100-16\nnodes: 1\nprice_per_gpu_hour: 1.5\ncurrency: EUR")
    argv = [*GPT, *QUICK, "--schedules", "flush", "--tokens", "20B"]
    status, out, _ = run(*argv, "--cluster", path, "--output", tmp_path / "plan")
    head = next(line for line in out.splitlines() if line.startswith("rank"))
    assert status == 0 and "days" in head and "cost/M tokens" in head
    said = next(line for line in out.splitlines() if line.startswith("the best: all tokens take"))
    assert "305,176 iterations" in said and said.endswith(" EUR")
    script = (tmp_path / "plan" / "best.sh").read_text()
    joined = " ".join(line.removeprefix("# ") for line in script.splitlines())
    assert said.removeprefix("the best: a") in joined
    assert said.removeprefix("the best: a") in unescape((tmp_path / "plan" / "report.html").read_text())
    best = json.loads(run(*argv, "--cluster", path, "--json")[1])["best"][0]
    assert best["num_iterations"] == 305_176 == -(-20_000_000_000 // (64 * 1024))
    assert best["cost"] == pytest.approx(1.5 * 8 * best["iteration_seconds"] * 305_176 / 3600)
    other = json.loads(run(*argv, "--cluster", path, "--price-per-gpu-hour", 3, "--json")[1])["best"][0]
    assert other["cost"] == pytest.approx(2 * best["cost"]) and other["currency"] == "EUR"
    free = json.loads(run(*argv, *CLUSTER, "--json")[1])["best"][0]
    assert free["days"] == best["days"] and free["cost"] is None


def test_objectives(run):
    """Cost needs a price, and ranks as time; memory takes what recomputes more, and says what it ranks by."""
    common = [*CLUSTER, *GPT, *QUICK, "--schedules", "flush", "--json"]
    fast = json.loads(run(*common)[1])
    status, _, err = run(*common, "--objective", "cost")
    assert status == 1 and err.splitlines()[-1] == (
        "error: --objective cost needs a price; give --price-per-gpu-hour, or price_per_gpu_hour in the cluster's file"
    )
    cheap = json.loads(run(*common, "--objective", "cost", "--price-per-gpu-hour", 2)[1])
    names = ("tensor", "pipeline", "micro_batch_size", "recompute", "rank_mapping")
    assert [[each[name] for name in names] for each in cheap["best"]] == [
        [each[name] for name in names] for each in fast["best"]
    ]
    assert any("cost ranks as time" in note for note in cheap["notes"])
    small = json.loads(run(*common, "--objective", "memory")[1])
    assert small["num_kept"] > fast["num_kept"] and small["objective"] == "memory"
    memory = [each["memory_gib"] for each in small["best"]]
    assert memory == sorted(memory) and memory[0] < fast["best"][0]["memory_gib"]
    assert "the smallest of each schedule" in run(*common[:-1], "--objective", "memory")[1]


def test_the_interval_of_the_best(run, tmp_path):
    """From runs of all sources, or the reason: with other constants, a profile, or what was never compared."""
    unfused = ["--transformer-impl", "local", "--fp16", "--schedules", "flush", "--tensor", 1, "--pipeline", 2]
    common = [*GPT, "--cluster", "A100-80", "--simulate", 1, *unfused]
    best = json.loads(run(*common, "--json")[1])["best"][0]
    assert best["iteration_seconds_low"] < best["iteration_seconds"] < best["iteration_seconds_high"]
    assert best["interval_runs"] > 300 and best["interval_of"] == "16 sources"
    assert re.search(r"^the best: with a probability of 80% it takes [0-9.]+ to [0-9.]+ s", run(*common)[1], re.M)
    mine = tmp_path / "a100.json"
    text = (ROOT / "megatron" / "planner" / "time" / "calibrations" / "a100.json").read_text()
    mine.write_text(text.replace('"launch": 0.00003', '"launch": 0.00002'))
    out = run(*common, "--calibrated-on", mine, "--json")[1]
    assert json.loads(out)["best"][0]["not_validated"] == "the constants of a100 were not held against published runs"
    assert any("are not validated: the constants of a100" in note for note in json.loads(out)["notes"])
    status, _, err = run(*common, "--residuals", mine)
    assert status == 1 and f"{mine}: " in err.splitlines()[-1]


@pytest.mark.parametrize("tokens", ["0", "many", "B", "-3B", "inf", "300G"])
def test_no_number_of_tokens(run, tokens):
    status, _, err = run(*CLUSTER, *GPT, f"--tokens={tokens}")
    assert status == 2 and f"'{tokens}' is no number of tokens; write 300B, 1.5T or 300e9" in err


def test_more_tokens_than_any_training_has(run):
    status, _, err = run(*CLUSTER, *GPT, "--tokens", "1e308")
    assert status == 2 and "'1e308' is more than any training has; give 1e+18 or less" in err


SHARED = [
    *GPT, "--cluster", "A100-80", "--nodes", 2, "--network", 200, "--schedules", "flush", "--simulate", 1,
    "--distributed-optimizer", "yes",
]  # fmt: skip


def test_a_script_trains_experts(run, tmp_path):
    """Where all experts of a layer lie on each rank, the best is started like any model, and no note says otherwise."""
    experts = ["--num-experts", 8, "--moe-layer-freq", "[0]+[1]*23", "--moe-aux-loss-coeff", "1e-2"]
    status, out, _ = run(*SHARED, "--disable-bias-linear", *experts, "--output", tmp_path)
    assert status == 0 and "priced here" not in out
    script = (tmp_path / "best.sh").read_text()
    assert "--num-experts 8 --moe-layer-freq '[0]+[1]*23' --moe-aux-loss-coeff 0.01" in script


def test_a_script_shares_sequences(run, tmp_path):
    """As the best does, and as the user's flags say how."""
    flags = ["--context-parallel-size", 2, "--cp-comm-type", "all_gather"]
    status, out, _ = run(*SHARED, *flags, "--output", tmp_path)
    assert status == 0 and "priced here" not in out
    assert "cp" in next(line for line in out.splitlines() if line.startswith("rank")).split()
    script = (tmp_path / "best.sh").read_text()
    assert "--context-parallel-size 2" in script and "--cp-comm-type all_gather" in script


@pytest.mark.full
def test_sizes_of_shared_ranks_are_searched(run):
    status, out, _ = run(*SHARED, "--context-parallel-sizes", "1,2", "--json", "--top", 1000)
    assert status == 0 and {each["context"] for each in json.loads(out)["best"]} == {1, 2}
    plain = json.loads(run(*SHARED, "--json")[1])
    assert {(each["context"], each["expert"]) for each in plain["best"]} == {(1, 1)}
    assert not any("priced here" in note for note in plain["notes"])


def test_other_predictions_know_no_shared_ranks(run):
    status, _, err = run(*SHARED, "--context-parallel-sizes", "1,2", "--predict-from", "profile.json")
    assert status == 1 and "--predict-from supports neither context parallelism nor experts; leave" in err
