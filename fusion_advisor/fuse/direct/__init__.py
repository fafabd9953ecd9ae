"""Calls of a verified signature past dynamo's frame: what its guards would find unchanged in the model is compared in bulk.

In: the code and the guards that dynamo made for a call. Out: ``DirectCall``, or None where dynamo has to see every call.
"""
