//! Model downloads: resumable, verified, atomic; the local model store.
