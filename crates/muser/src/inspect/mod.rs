//! What can be said about a model file without computing with it: figures, sizes, what is odd.

mod identity;
mod report;

pub use identity::{hash, identify};
pub use report::{Report, TensorLine};
