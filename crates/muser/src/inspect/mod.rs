//! What can be said about a model file without computing with it: figures, sizes, what is odd.

mod odd;
mod report;

pub use report::{Report, TensorLine};
