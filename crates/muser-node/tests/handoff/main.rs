//! A prompt is read by another node: two engines and more in one process, over connections without sockets.

mod exact;
mod faults;
mod support;
mod wire;
