"""What a proof reports about the program that it accepted."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CheckReport:
    """Facts about a program that has been proved.

    Attributes:
        num_ranks, num_stages, num_batches, num_microbatches, num_instructions: its extent.
        communicates: whether it contains transfers; those of a compute-only program are taken to happen by themselves.
        versioned: whether it names weight versions and updates weights. Without, nothing is said about either.
        peak_saved_microbatches: per stage, the largest number of microbatches between their forward and the end of
            their backward, less those evicted, more those accepted, at the worst timing.
        peak_saved_on_rank: per rank, the same over all its stages at once; a microbatch counts once at each of them.
        peak_recomputed_microbatches: per stage, the largest number between their recompute and the end of their
            backward, or of its input half.
        peak_deferred_microbatches: per stage, the largest number between the two halves of their backward, I and W, of
            which a stage holds what W needs. They are among the saved ones.
        peak_waiting_on_rank: per rank, the most activations, or gradients of them, that one of its stages has made and
            another one has not taken yet.
        live_versions: per stage, the largest number of weight versions that are live at once; empty where the program
            is not versioned.
        num_fetches: per rank, how often it fetches the weights of a stage from the host; empty where they live on the
            device.
        peak_resident_stages: per rank, the most stages whose weights are on the device at once; likewise.
        offloaded_microbatches: per stage, how many microbatches leave their input to the host and take it back.
        peak_boundaries_on_rank: where weights live on the host, per rank the most tensors between stages that are on
            its device at once, at the worst timing: those that wait between two of its stages, and inputs that are kept
            for a recompute. Empty where weights live on the device.
        evicted_microbatches: per stage, how many microbatches move to the pair stage and back.
    """

    num_ranks: int
    num_stages: int
    num_batches: int
    num_microbatches: int
    num_instructions: int
    communicates: bool
    versioned: bool
    peak_saved_microbatches: tuple[int, ...]
    peak_saved_on_rank: tuple[int, ...]
    peak_recomputed_microbatches: tuple[int, ...]
    peak_deferred_microbatches: tuple[int, ...]
    peak_waiting_on_rank: tuple[int, ...]
    live_versions: tuple[int, ...]
    num_fetches: tuple[int, ...]
    peak_resident_stages: tuple[int, ...]
    evicted_microbatches: tuple[int, ...]
    offloaded_microbatches: tuple[int, ...]
    peak_boundaries_on_rank: tuple[int, ...]
