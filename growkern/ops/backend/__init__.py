"""Chooses and loads backends: compiled CPU code, Triton, CUDA C++."""
