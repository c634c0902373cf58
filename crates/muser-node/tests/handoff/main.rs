//! A prompt is read by another node: two engines and more in one process, over TLS on loopback, and over connections without sockets for faults that
//! are to happen at a certain place.

mod exact;
mod faults;
mod net;
mod proof;
mod support;
mod wire;
