"""Every private torch API that the project uses, by area of torch: one function and one test for each.

When a torch release moves one of them, these files and their tests are the only places to mend. Tried on torch 2.11 and 2.13.
"""
