"""Measures calls, and says how. What stands here is what happens; the numbers are in `policy`, `race` and `tolerance`.
What is said of a CPU holds for CUDA devices, too, as far as the section on them says nothing else.

Process
    One child process per device: a fresh interpreter in a session and process group of its own, which the system kills
    when its parent (exactly: the thread that started it) ends, and which leaves when its pipe closes. It may be begun
    before there is a request, as some of those that compile, to import what it needs meanwhile. Messages are
    JSON; no tensor travels. It computes with the stated number of threads on as many cores, gradients and the garbage
    collector off. `timeout_s` counts from the moment that work on a call begins in the child (once for setting it up
    and verifying it, again for each sample), read from memory that both share, so that nothing wakes up beside a kernel
    that is being timed; the parent looks twice a second. Work of the harness itself (float64 references) may take 20
    times as long. Past it the process group is killed. A call that ends the child or is late is left out of its race,
    the rest of which runs again in a new child; then it is tried once more, alone, and its status is stored. A child
    killed by the system while its count of out-of-memory kills rises is `out_of_memory`; the child offers itself first
    for that. A lock file per device (all cores, or one CUDA device by UUID) and user keeps two tunings from timing at
    once; compiling for a CPU shares it. Whoever waits for it says so every second, with the number of the process that
    holds it. Kernels that compile are built by `prepare` ahead of timing, one process per core; on CUDA devices also by
    `compile_beside` while others are timed: with two cores left to timing, that changes no timing beyond its noise.

Truth
    Inputs are normal random numbers from a seed made of the subgraph's signature, the same for all its candidates;
    dropout masks keep with 1 - p; what must be positive or consistent is. Every call is verified before it is timed, in
    the child, against float64: outputs are poisoned (NaN; boolean ones with a pattern, run again with the opposite one
    and the same seed); every element must be written, finite where the reference is, within tolerance, in the shape and
    strides of the candidate's form; inputs must be unchanged and nothing written beside the outputs. Drawn dropout
    masks must hold only 0 and 1, or 0 and 1 / (1 - p), keep 1 - p within six standard deviations, repeat with torch's
    seed and change with it; the reference takes them as given. What fails is `wrong`, and never timed.

A sample
    Each call gets up to 16 operand sets, as many as make their sum exceed `rotate_bytes`; where that is not stated, up
    to 64 sets and four times the second-level caches in use. So operands come from beyond the second level, as a
    training step finds what an earlier operator left. Slices of one stack share a buffer. A sample is the mean of calls
    over the sets that last 200 us or more together, or one call where that takes above 20 ms. Calls shorter than 1 ms
    are timed one by one, each after small operators of other kinds, untimed: a kernel that follows itself finds its own
    instructions at hand, which in a step it does not (8 us a call for a tiny layer in bfloat16). Every
    candidate is called untimed first, up to once per set; its first timed samples, the look, are not kept unless they
    are all that there is. Where operand sets take more than a quarter of memory, they make room and are filled again.
    A kept sample in which threads of the child waited for a core for more than 5 % of its time (another process ran
    there; Linux counts that per thread) is taken again after a pause, up to 10 times or until 0.1 s are gone; then the
    least counts. On a busy machine this is the difference between 36 us and 14 ms for a kernel of two threads.

Racing
    See `Race`: a look each (the least of two samples), then 3 to 10 samples in rounds; above 2, 1.5 and 1.2 times the
    incumbent a candidate waits aside, once two looks or samples agree on that; enough is a 95 % interval of the median
    below max(1 %, 0.5 us), or 5 seconds of sampling. Whoever is out is still `ok`, with the least that it has shown and
    the mark `eliminated`. Half of the looks and samples of a call, or more, that had to wait for a core all the same,
    or of which a second drift was seen, make it `contended` or `drifted`.
    A canary (a small matrix product) is timed every two seconds and at the end of each race, before its timings are
    handed out: if it differs by more than 10 % from last time, what the race sampled in between is taken again, once.
    `noise_floor` is the median difference of five races between two identical calls.

Roofline
    What so many bytes moved and so many flop of a product take at least: plain copies, additions, sums and fills, and
    products of square matrices in every order of their operands, in operand sets and after other operators as
    candidates are. Of three short samples of each, in two passes over all amounts, the least counts. Not verified.

CUDA devices
    The child works on one stream of its own. Values, operand sets and float64 references are made on the device, values
    by its generator. What is verified is added up there, and the host reads one number; only where that is not zero,
    masks are drawn or a reference is not finite, it looks closer.
    A call is timed as deployed: one graph holds as many calls as last 200 us, at most 512, each operand set equally
    often. Events that are nodes of the graph stand around them, so that starting it is in no sample, and what lies
    between two kernels of a graph is. Every set's kernel is called once before, uncaptured; the first replay is no
    sample, but where it shows that more calls are needed, the graph is made anew. What cannot be captured is `refused`;
    under a policy without graphs, calls are timed one by one instead, each after a flush of exactly the second-level
    cache, behind a short delay in which the host gets ahead.
    Operands rotate through half of what a training step touches, in up to 16 sets, but through no more than twice the
    second-level cache (rounded up to a power of two; that much where nothing is stated): beyond that cache there is
    only memory. Nothing runs between the calls of a graph.
    A round's samples are queued together, up to half a second of them, and waited for once. Meanwhile the clock of the
    multiprocessors is read; samples at less than 75 % of the highest clock seen are taken again after a pause, up to
    five times. Other processes that compute on the device at the start of a race are warned of, and not waited for.
    After any error the device is waited for. If it answers with another error, its context is lost: the child ends,
    as after a crash. Where memory ran out, what torch's allocator caches is given back.
    Workspace is what torch's allocator hands out at most. Amounts go up to 1 GiB and cubes of 8192; a cube counts at
    no lower rate than the next larger one, which may fill the multiprocessors better.

Workspace
    What a call allocates at most while it runs comes from one more untimed call, right after it was verified, in which
    the events of torch's CPU allocator are recorded (2 us, and the call itself; see `allocated_bytes`). Memory that a
    library takes elsewhere, and what a kernel allocated when it was built, are not in it.
"""

from autotuner.measure.devices import policy_for, rotate_bytes
from autotuner.measure.lock import lock_path, locked
from autotuner.measure.measurer import Measurer, Result
from autotuner.measure.policy import CpuPolicy, CudaPolicy, Policy

__all__ = [
    "CpuPolicy",
    "CudaPolicy",
    "Measurer",
    "Policy",
    "Result",
    "lock_path",
    "locked",
    "policy_for",
    "rotate_bytes",
]
