"""Limits of the op `expand`: apart, so that the command line need not import PyTorch."""

# beyond it, one of two shares is more than twice the weight, and the other one may be rounded
MOST_AMPLITUDE = 3.0
# of one source index; kernels read this number in 15 bits
MOST_COPIES = (1 << 15) - 1
# of an axis; kernels count in int32, and threads step up to 2**19 past the end
MOST_ENTRIES = (1 << 31) - (1 << 20)
