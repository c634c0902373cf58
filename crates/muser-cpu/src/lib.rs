//! CPU executor: row-invariant kernels and a thread pool.
