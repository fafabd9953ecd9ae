"""Long texts by code; a class's own message, note and hint are added by ``explain``."""

from __future__ import annotations

SUBJECTS = {
    "0": "the command line and configuration",
    "1": "finding and loading a model",
    "2": "the machine (devices, drivers, compilers)",
    "3": "running the model and its step",
    "4": "kernels (building, checking, the library)",
    "5": "files (reports, traces, runs, plans)",
    "6": "reasons why a chain has no kernel (in a report)",
    "7": "gates of compare and apply",
    "8": "several ranks under torchrun",
}
"""First digit of a code: what the codes are about."""

TITLES = {
    "FA601": "An op of the chain has no lowering",
    "FA602": "The chain would have to cross a mutation",
    "FA603": "A layout or a reshape cannot be folded into an address",
    "FA604": "The chain's reductions do not run over the same dims",
    "FA605": "Nothing to win: the chain is at its floor or below the threshold",
    "FA606": "A dtype that no kernel handles",
    "FA607": "Left out by --only or --skip",
}
"""Codes of reasons in a report; these are not errors."""

TEXTS: dict[str, tuple[str, ...]] = {
    "FA001": ("Options contradict each other, or an option has a value that does not exist. Nothing was loaded or written.",),
    "FA002": ("Codes are FA followed by three digits; run `fusion-advisor explain` without a code for the list.",),
    "FA003": (
        "Keys of fusion-advisor.toml, of [tool.fusion-advisor] in pyproject.toml and of the user's config.toml are the long "
        "options without dashes; [apply] and the like hold keys for one command. FUSION_ADVISOR_BATCH is --batch. A flag wins "
        "over the environment, the environment over the project's file, and that file over the user's; `--show-config` "
        "prints all.",
        "--trust-remote-code and --force are only taken from the command line: a file must not be able to switch them on.",
    ),
    "FA101": (
        "The id is looked up as a local directory, then in the local cache, then on the Hub, then among the "
        "configurations that ship with fusion-advisor. A private or gated model looks like a missing one to a reader "
        "without a token.",
    ),
    "FA102": (
        "The Hub has the model and refuses to send its files. Log in with your account and accept the owner's terms first.",
    ),
    "FA103": (
        "Some repositories ship Python that builds the model. It would run with your rights, so it only "
        "runs on request. Read the files of the revision that you pass, then pass --trust-remote-code.",
    ),
    "FA104": ("The directory or repository has no config.json that transformers can read.",),
    "FA105": (
        "`--weights hub` and `--weights local` insist on real weights. Speed does not depend on weight values, so "
        "random weights suffice to find and time fusions. Only statements on accuracy need real weights; the "
        "report says which weights were used.",
    ),
    "FA106": ("The configuration names a model type that the installed transformers does not have; a newer one may.",),
    "FA107": (
        "fusion-advisor makes inputs (ids, pixels, features) from the model's configuration. This model needs inputs that its "
        "configuration does not describe.",
    ),
    "FA201": (
        "PyTorch sees no CUDA device: a CPU build of torch, a driver older than the CUDA that torch was built with, "
        "or CUDA_VISIBLE_DEVICES hides them. `fusion-advisor doctor` says which.",
    ),
    "FA202": (
        "Triton kernels are built by the triton package that belongs to the installed torch; another version may not import.",
    ),
    "FA205": ("Some commands need libraries that most users do not: they come with an extra of the package.",),
    "FA203": (
        "On a CPU every kernel is rendered as C++ and compiled on the spot by g++, clang++ or the compiler that CXX names. "
        "Without a compiler no kernel can be built, so `apply` ends before it measures anything. `profile` needs none.",
    ),
    "FA301": (
        "The step did not fit. Besides the model, a run holds a second copy of the outputs for the check and, where "
        "it fits, a higher-precision copy of the model. A smaller batch or shorter sequence changes the shares, so "
        "compare runs of equal shapes only.",
    ),
    "FA302": ("The factory is your own code. It ran and raised an exception.",),
    "FA303": (
        "TorchDynamo records the ops that a forward pass runs. Where it cannot follow the Python code, it breaks "
        "the graph; here it recorded nothing. The part of the model that is plain PyTorch can be profiled alone "
        "through a factory.",
    ),
    "FA304": ("Positions beyond the model's maximum have no embedding, or are outside the range of the rotary table.",),
    "FA305": ("A factory is called without arguments and returns (model, example_inputs); the inputs are a tuple or a dict.",),
    "FA310": (
        "--input names a function without arguments, in a file or a module, that returns the arguments of the model: one "
        "tensor, a tuple of positional arguments, or a dict of keyword arguments. Tensors are moved to the device, and "
        "floating-point tensors take the model's dtype.",
    ),
    "FA311": (
        "A training step needs a scalar to begin the backward pass at: the model's own loss where it returns one (labels make "
        "it), else the mean of its floating-point outputs. Here none depends on a parameter that requires gradients, or the "
        "model raised in train() mode, or autograd refused an op.",
    ),
    "FA313": (
        'Without phase="train" the fused kernels are for inference: dropout and gradients are left to the model\'s own ops, so '
        "the built kernels would never run. The model itself, or a dropout inside it, is in train() mode.",
    ),
    "FA314": (
        "Kernels and compiled graphs belong to this process, and the graphs read this model's own tensors. The model itself can "
        "be copied, pickled and saved while it is fused: the copy runs its own ops. The object that `fa.apply` returns cannot.",
    ),
    "FA315": (
        "A fused call stays only after its results were compared with the original's. This model's call returns no tensor (None, "
        "a string, a Python number) and writes to none among its inputs and buffers, so there is nothing to compare.",
    ),
    "FA316": (
        "`apply --shapes` calls the original model at both ends of each range before anything is measured (on a CPU; on a GPU a "
        "bad index would end the process). The model raised there: a table that ends, a mask of fixed size, a size that its "
        "layers cannot divide. The error names the nearest size that it takes. On a GPU the "
        "first graph of a range finds such a size.",
    ),
    "FA317": (
        "Measuring, tracing and checking call the model many times with the same inputs. A later call raised in the model's own "
        "code: it counts its calls, keeps a list that ends, or refuses one of the ways in which it was called (traced, or in "
        "float64). The model is as it was before.",
    ),
    "FA318": (
        "A fused step computes gradients with kernels that were derived from the model's ops, and these have no derivative of "
        "their own. torch.compile's steps have none either. A gradient penalty, a Hessian or an optimizer that asks for second "
        "derivatives needs the model's own ops.",
    ),
    "FA319": (
        "Autocast chooses the dtype of each op, so kernels that fit one autocast are wrong under another. Kernels for inference "
        "run only where autocast is off around the call. One that the model's forward enters is part of its graph and is fused. "
        'With phase="train" the step is fused under the autocast of its own call.',
    ),
    "FA306": ("The run directory could not be made or written: a full disk, a read-only file system, or missing rights.",),
    "FA307": (
        "The model was built and called once, unchanged and with nothing measured, and raised. The inputs may not fit "
        "it: choose them with --input FILE.py:fn, or pass FILE.py:factory returning (model, example_inputs).",
    ),
    "FA308": (
        "Measuring, tracing and checking repeat a step, so everything that it writes (a cache, a count) is restored "
        "before each repeat. "
        "A growing cache cannot be restored; a cache of fixed size can.",
    ),
    "FA309": (
        "A decode step reads and writes a KV cache of fixed size (transformers' StaticCache), so that every step has the same "
        "shapes. State-space models, encoder-decoders and models with a cache of their own are not covered.",
    ),
    "FA401": (
        "The kernel was rendered and its compiler refused it: too much shared memory, an intrinsic this device does "
        "not have, or a bug of ours. The fusion is skipped and the model is as it was. The compiler's message is "
        "in log.txt.",
    ),
    "FA402": (
        "Each fused kernel is compared with a higher-precision run of the ops it replaces, and with those ops' own "
        "error against the same run. It fails when its error is larger than the stated limit, or when exactly one "
        "side is NaN or infinite. A kernel that fails is removed before it is timed: a wrong kernel has no speed.",
    ),
    "FA403": (
        "The rewritten model ran, but the new kernel was never launched, or the rewrite replaced no site. The report gives the "
        "reason for each site.",
    ),
    "FA404": ("Each case of kernel.toml is built and compared with reference.py for every backend and dtype it declares.",),
    "FA410": (
        "An unknown key, a missing key or a value of the wrong kind in a manifest is refused; the message names the file and the "
        "key. The comments that `kernels new` writes explain each field.",
    ),
    "FA411": ("Kernels are looked up by their manifests' names, in the shipped library and in each --kernels directory.",),
    "FA412": (
        "reference.py is imported and its functions traced: they are the pattern, the oracle and the baseline at once. It has to "
        "import without side effects, and each function's parameters are the manifest's inputs, its keywords the constants.",
    ),
    "FA413": (
        "One kernel did not compile. A run skips its fusion and the report keeps the reason; `kernels check` counts a failed "
        "case.",
    ),
    "FA414": (
        "A C++ kernel first runs in a process of its own, on copies of a site's tensors, each of which ends at a "
        "guard page. The kernel is refused if that process crashes (a signal, abort, exit) or runs for more than ten seconds "
        "(longer for large tensors). The fusion is skipped and the run goes on.",
    ),
    "FA415": (
        "A fault on a GPU (an illegal address, a failed assertion) spoils the context of the whole process: every later call "
        "fails too, the original ops among them. So the run ends there. The report of what was tried until then is written and "
        "names the guilty kernel. A new process without that kernel does not have the fault.",
    ),
    "FA416": (
        "A model that was fused with its cache writes to that cache in each call. A call stopped after it may have begun to: a "
        "value inside the model was laid out differently than when it was verified, or the original ops ran after a CUDA graph "
        "had been launched ahead of them. The cache then holds part of a step, so no result is returned. Reset the cache and "
        "repeat.",
    ),
    "FA501": (
        "A report or capture is refused if it is truncated, has an unknown key, or has a value of another type; the message "
        "names the place. Reports are written to a temporary file first, so a crash leaves the old report intact.",
        "A trace that ends early is not ranked, because the missing part could hold anything. Some versions of torch write "
        "control characters and quotes in names unescaped, which is not valid JSON.",
    ),
    "FA502": (
        "Every call that launches a kernel carries an id that its kernel carries too. Where over 1 % of them have none, "
        "the profiler dropped some, or stopped before they ran. Shares of an incomplete trace would be wrong without looking "
        "wrong, so none are printed. A call or two at the edges of a recorded window is common, and only a warning.",
        "Two profilers cannot both read the device's counters: under nsys or ncu torch.profiler sees launches and no kernels.",
    ),
    "FA503": ("The first key of a report names its schema. Within one schema only optional fields are added.",),
    "FA504": (
        "A run is named by a path, its id, a prefix that fits one run alone, or @last. Ids are looked up in "
        "./fusion-runs, so the working directory matters.",
    ),
    "FA506": (
        "A saved plan names ops of one captured graph. It is only put in place where today's graph is the same: same ops, "
        "same arguments, same shapes and strides, same kind of device. Another sequence length, dtype or library version "
        "gives another graph, and then `apply` has to run again.",
    ),
    "FA507": (
        "`specialize` binds kernels that were built for one shape to the sizes of another call. It refuses to go from "
        "many rows to few or back, because other rewrites pay there, and refuses kernels that do not fit or give other numbers.",
    ),
    "FA508": (
        "`compare` reads a run as its rewritten step where there is one, else as its eager step. RUN:eager, RUN:applied and "
        "RUN:compile choose; a run has the step under torch.compile only where --compile measured it.",
    ),
    "FA509": (
        "Two profilers cannot both read the device's counters, so under nsys or ncu torch.profiler is not started. The eager "
        "step is still warmed up and timed, between cudaProfilerStart and cudaProfilerStop, for the other profiler to record; "
        "the run ends there, because a report needs the kernels. Both are recognised by the environment variables that they set.",
    ),
    "FA511": (
        "`fusion-advisor plan` reads capture.json.gz: the ops of the step, their tensors and the kernels that they launched. "
        "`profile` and `apply` write it into the run directory once the step is captured. A copy of a report alone has none.",
    ),
    "FA512": (
        "Every rewrite is timed against the same step without it, and the step against itself. Where the step differs from "
        "itself by more than the largest gain that is expected of any rewrite, no rewrite could have passed, and the run says "
        "so instead of calling the rewrites too slow. On a CPU only the CPU time of the busiest thread counts, so it takes a "
        "very busy machine, or threads that spin while they wait: set OMP_WAIT_POLICY=PASSIVE before Python starts.",
    ),
    "FA516": (
        "A worker holds at most 800,000 events of a trace, some 700 MB. Of a larger trace it ranks the first whole steps "
        "and scales them; where one step alone is larger, nothing can be ranked.",
    ),
    "FA513": ("`fleet --weights` reads a CSV file with the columns job and gpu_hours, and optionally model.",),
    "FA514": ("`fleet` takes patterns that fsspec opens: local paths, s3://, gs://, hf://. ** stands for any folders.",),
    "FA515": (
        "Traces that were read before the cluster went away have their Parquet parts; the same command reads the others. "
        "Ray itself repeats tasks whose worker died.",
    ),
    "FA701": (
        "A gate fails only where the whole 95 % interval is past the limit, so a figure just over it in a noisy run passes and "
        "says so. speedup and regression judge ratios of times of one run; milliseconds of different runs differ between "
        "machines of the same name, and are judged with --absolute alone.",
    ),
    "FA702": (
        "The run has no figure to compare with the limit: nothing was applied (--dry-run), the step was not timed, or the two "
        "runs are of different devices, models or shapes. A gate that cannot be checked does not pass.",
    ),
    "FA517": (
        "A package holds one graph: kernels of chains and of linear layers, torch's own ops, merged GEMMs and constants. A KV "
        "cache comes in as an argument. It holds no graph break, and no object in the output that a call cannot make.",
        "--skip leaves a rewrite out. --format pt2 takes no kernel that only Python can launch. --format patch takes chains that "
        "some statements of one function compute, without other ops. --format kernels takes every chain as a function.",
        "--within gives up after so many seconds and says in which stage that was.",
    ),
    "FA518": ("Only kernels of chains that were kept go into a package; a run that kept none has nothing to give.",),
    "FA519": (
        "A package appears as a whole, under another name first. --force replaces a folder; without it nothing is touched.",
    ),
    "FA520": (
        "A kernel's kernel.toml may name a licence. Kernels without one are under this project's own, Apache-2.0.",
        "Only licences that allow a copy to be passed on are exported: Apache-2.0, MIT, BSD, ISC, Unlicense, CC0, Zlib.",
    ),
    "FA521": (
        "A run holds its directory while it writes. The system lets go of it when the process ends, also when it is killed: a "
        "half-written run never stops a new one.",
    ),
    "FA522": (
        "In models that fusion-advisor loads the weights of linears that read one input lie side by side, so that they can run "
        "as one GEMM, and weights of an odd number of rows have room after them. A model that you load has its weights where its "
        "library put them, and is not touched unasked.",
        "Parameters stay the same objects. What holds a view of a weight's old memory keeps that memory.",
    ),
    "FA801": (
        "torchrun starts a process for each GPU and tells each its number (RANK), how many there are (WORLD_SIZE) and where they "
        "meet (MASTER_ADDR, MASTER_PORT). `python -m torch.distributed.run` is the same program.",
    ),
    "FA802": (
        "All ranks run the same step in the same order, because a collective waits for all of them. So their versions, request, "
        "inputs, model, captured graph and plan are compared, and the run ends at the first difference.",
    ),
    "FA803": (
        "--tp auto splits linears as the model's own plan says: colwise by output features, rowwise by input features. Sizes and "
        "heads must be multiples of the number of ranks, and other styles of a plan (experts, sequences) are not known here.",
    ),
    "FA804": (
        "Each rank gives a sign of life twice a second. A rank whose process is gone is noticed within 6 s; one that others wait "
        "for and that comes to no new place, within 20 s. The other ranks then end too, with the name of that rank.",
    ),
    "FA505": ("A run is only overwritten with --force; without -o every run gets its own directory.",),
    "FA601": (
        "A chain becomes a kernel by turning each op into an expression. One of its ops has no such rule: it draws "
        "random numbers, has several outputs, rounds in an unusual way, or is simply not known yet. The reason in the "
        "report names the op.",
        "A kernel of your own can cover it: `fusion-advisor kernels new NAME`, then pass --kernels DIR.",
    ),
    "FA602": (
        "Between the chain's first and last op something writes into storage that the chain reads, such as a "
        "key/value cache. One kernel runs at one place, and no single place would see the values that the separate "
        "ops saw.",
    ),
    "FA603": (
        "Inside a kernel a view is arithmetic on an address. A reshape that splits or merges iterated dims, a strided "
        "slice, or a cat along a dim that is not iterated has no such arithmetic in the skeletons that exist.",
        "Often the reshape can move before or after the chain in the model's source without changing its result.",
    ),
    "FA604": (
        "A row-wise kernel holds one row and reduces it, as often as needed. Here reductions run over different dims, "
        "or over dims that are not the innermost ones, so no row serves them all. The chain is usually cut there into "
        "two that do fuse.",
    ),
    "FA605": (
        "The floor is the time of a perfect kernel: every outside value read once, every result written "
        "once, at the copy bandwidth measured in the run, plus one smallest launch. This chain takes hardly longer, "
        "or the most it could save is below --min-share or --min-gain, so its gain could not be distinguished from noise.",
    ),
    "FA606": (
        "Kernels handle fp32, fp16, bf16, fp64, and integers and booleans as inputs; complex and 8-bit floats are left alone.",
    ),
    "FA607": ("The chain matches a --skip pattern, or none of the --only patterns.",),
}
