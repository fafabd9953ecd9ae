"""Helpers around Python and torch at run time: private torch APIs, tensors inside call arguments, GC pauses, memory.

In: live torch objects. Out: plain values, so that no other folder touches a private API.
"""
