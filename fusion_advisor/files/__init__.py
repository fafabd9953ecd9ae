"""Files that somebody else may have made or changed: names, kinds, owners and digests are checked before anything is read.

In: a name or a path. Out: a path inside one folder, bytes of limited size, or machine code whose digest fits.
"""
