//! What `muser doctor` finds out: the machine, what muser uses of it, whether it computes right.

mod machine;
mod self_test;
mod wgpu;

pub use machine::Machine;
pub use self_test::{TypeResult, self_test, tested_types};
pub use wgpu::WgpuReport;
