//! What `muser doctor` looks at.

mod machine;

pub use machine::Machine;
