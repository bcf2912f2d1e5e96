"""CuTeDSL kernels and their launchers. Importing one loads the compiler, which CPU ranks do without."""
