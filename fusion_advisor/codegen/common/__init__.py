"""What all backends share: the interface of a kernel, argument lists, the expression printer, the header comment."""
