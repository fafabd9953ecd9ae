"""The other ways to run the step: eager, torch.compile, Liger, CUDA graph; timed interleaved with ours."""
