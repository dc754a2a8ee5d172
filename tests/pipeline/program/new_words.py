"""Three words that the project does not have: edits of three of its files, and a run of a program with them.

A row of each goes into the words' table, what they must find into the proof of inputs on the host, and a method of each
into the executor. Everything else is the project's own. Run as a module, it writes what came out as JSON.

    0PARK5     copy the input of microbatch 5 to the host: a lane of its own time, and memory that becomes free
    0UNPARK5   copy it back: waits for the PARK, as a RELOAD waits for its OFFLOAD
    0AWAIT5    wait for that copy, on the rank itself
"""

from __future__ import annotations

import json
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader

EDITS: dict[str, tuple[tuple[str, str], ...]] = {  # module -> (what stands there, what is put before it)
    "megatron.pipeline.program.instruction": (
        (
            '    REDUCE_GRAD = "REDUCE_GRAD"',
            '    PARK = "PARK"\n    UNPARK = "UNPARK"\n    AWAIT = "AWAIT"\n',
        ),
        (
            "    Kind.REDUCE_GRAD: _UPDATE(",
            """
    Kind.PARK: Word(
        name="input parked", lane=Lane.D2H, saved=-1, colour="moss", proof=Proof.STASH, cost="park", handler="_park"
    ),
    Kind.UNPARK: Word(
        name="input unparked", lane=Lane.H2D, saved=+1, awaits=(Kind.PARK,), colour="steel", proof=Proof.STASH,
        cost="unpark", handler="_unpark",
    ),
    Kind.AWAIT: Word(
        name="wait for an input", lane=Lane.COMPUTE, awaits=(Kind.UNPARK,), colour="brick", proof=Proof.STASH,
        handler="_await_input",
    ),
""",
        ),
    ),
    "megatron.pipeline.check.memory": (
        (
            "def prove_stash(",
            """
from megatron.pipeline.check.compact import codes_of

_COMING = 5
_PARK, _UNPARK, _AWAIT = codes_of("PARK UNPARK AWAIT")
_MUST_FIND |= {_PARK: ((_HERE,), _AWAY), _UNPARK: ((_AWAY,), _COMING), _AWAIT: ((_COMING,), _BACK)}
_FOUND[_COMING] = "its input is on its way, and no AWAIT stands before it"


""",
        ),
    ),
    "megatron.pipeline.runtime.executor": (
        (
            "    def _evict(self",
            """
    def _park(self, instruction):
        stage, microbatch = self._stages[instruction.stage], self._microbatches[instruction.microbatch]
        self._lanes.request(instruction, self._stash.offload(stage, microbatch))

    def _unpark(self, instruction):
        stage, microbatch = self._stages[instruction.stage], self._microbatches[instruction.microbatch]
        self._lanes.request(instruction, self._stash.reload(stage, microbatch))

    def _await_input(self, instruction):
        self._wait_for_lanes(instruction)

""",
        ),
    ),
}


class _Loader(SourceFileLoader):
    """Loads a module as if its file had the edits."""

    def get_code(self, fullname: str):
        text = self.get_data(self.path).decode()
        for mark, added in EDITS[fullname]:
            assert text.count(mark) == 1, f"{fullname} has {mark!r} {text.count(mark)} times"
            text = text.replace(mark, added + mark)
        return self.source_to_code(text.encode(), self.path)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        if fullname not in EDITS:
            return None
        spec = PathFinder.find_spec(fullname, path)
        spec.loader = _Loader(fullname, spec.origin)
        return spec


def main() -> dict:
    sys.meta_path.insert(0, _Finder())
    from megatron.pipeline.check import ProgramError, check
    from megatron.pipeline.draw import draw_timeline, timeline_text
    from megatron.pipeline.draw.page import page_timeline
    from megatron.pipeline.program.instruction import Instruction, Kind
    from megatron.pipeline.program.lane_order import Residency
    from megatron.pipeline.program.program import Program
    from megatron.pipeline.program.weight_policies import FLUSH
    from megatron.pipeline.runtime.contract.trace import Tracer, timeline
    from megatron.pipeline.runtime.engine import PipelineEngine
    from megatron.pipeline.runtime.stages.emulated import EmulatedRelayUpdate, EmulatedStage, EmulatedTimes
    from megatron.pipeline.schedules import Schedule
    from megatron.pipeline.schedules.pipeline_schedule import ProgramInSegments
    from megatron.pipeline.simulate import Costs, simulate
    from megatron.pipeline.simulate.memory_curve import MemorySizes, memory_curves

    def parked(row):
        """A pass: inputs are parked instead of offloaded, and each recompute has its wait before it."""
        new, away = {Kind.OFFLOAD: Kind.PARK, Kind.RELOAD: Kind.UNPARK}, set()
        for each in row:
            if each.kind in new:
                away.add((each.stage, each.microbatch))
                yield Instruction(new[each.kind], each.stage, each.microbatch)
                continue
            if each.kind is Kind.RECOMPUTE and (each.stage, each.microbatch) in away:
                yield Instruction(Kind.AWAIT, each.stage, each.microbatch)
            yield each

    class Parking(Schedule):
        def _build(self, batches, first_batch, first_microbatch):
            built, count = super()._build(batches, first_batch, first_microbatch), len(batches) + 1
            rows = zip(built.program.rows, built.borders, strict=True)
            segments = [[list(parked(row[at[i] : at[i + 1]])) for i in range(count)] for row, at in rows]
            return ProgramInSegments.join(built.program, segments)

    choices = {"num_stages": 3, "num_virtual_stages": 3, "residency": Residency(2, "eager", "host")}
    usual, schedule = Schedule.preset("l2l", **choices), Parking.preset("l2l", **choices)
    program, plain = schedule.build((4, 4)), usual.build((4, 4))
    read = Program.from_csv(program.to_csv())
    report, other = check(program), check(plain)

    def refused(row):
        try:
            check(program.with_rows((tuple(row),)))
        except ProgramError as error:
            return error.reason
        return None

    lone = [each for each in program.rows[0] if each.kind is not Kind.AWAIT]
    twice = [each for each in program.rows[0] for _ in range(1 + (each.kind is Kind.PARK))]
    costs = Costs(others={"park": 0.5, "unpark": 20.0})
    simulated, quick = simulate(program, costs), simulate(program)
    sizes = MemorySizes(activations=1.0)
    page, figure = page_timeline(simulated, name="parked"), draw_timeline(simulated)

    stages = [EmulatedStage(index=i, num_stages=3, times=EmulatedTimes(0.0, 0.0), payload_bytes=4) for i in range(3)]
    engine = PipelineEngine(
        schedule, stages, EmulatedRelayUpdate(Costs().seconds(3), stages=range(3)), ranks=[0],
        tracer=Tracer(num_batches=2),
    )  # fmt: skip
    for _ in range(2):
        engine.run_batch(4, 4)
    engine.drain()
    run = timeline([engine.trace()])
    engine.close()
    return {
        "words": sorted({each.kind.value for each in program.rows[0]} - {each.kind.value for each in plain.rows[0]}),
        "reads": read == program,
        "offloaded": [report.offloaded_microbatches, other.offloaded_microbatches],
        "saved": [report.peak_saved_microbatches, other.peak_saved_microbatches],
        "refused": [refused(lone), refused(twice)],
        "spans": {
            kind.value: sorted({span.end - span.start for span in simulated.spans if span.instruction.kind is kind})
            for kind in (Kind.PARK, Kind.UNPARK)
        },
        "seconds": [simulated.makespan, quick.makespan],
        "curve": [
            max(memory_curves(simulate(each), sizes, FLUSH)[0].parts["activations"]) for each in (program, plain)
        ],
        "legend": [text.get_text() for text in figure.legends[0].get_texts()],
        "signs": [sign.meaning for sign in page.signs],
        "text": timeline_text(simulated, width=400).plain,
        "run": [tuple(map(str, row)) for row in run.rows] == [tuple(map(str, row)) for row in program.rows],
    }


if __name__ == "__main__":
    print(json.dumps(main()))
