"""A kept plan as source code of its own: a Python package that needs torch alone, and not fusion_advisor.

In: a run, its model and its plan, which is put in again. Out: a folder with the kernels as torch ops, the rewritten forward as
readable Python, tests and a benchmark. The graph is rebuilt when it is exported, not recorded when it is applied: so every run
folder can be exported, the ops are compared with the captured ones, and the parameters' names are those of the live model.
"""
