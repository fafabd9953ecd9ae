"""The one tracer: dynamo's graph retraced into ATen ops that keep their module path and source line.

In: a live model and a call. Out: regions (FX graphs with the tensors of the call).
"""
