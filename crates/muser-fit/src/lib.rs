//! The planner: which layers of a model go to which device, what that is expected to reach, and what would change it.
//!
//! Everything here is a pure function of a model's header ([`ModelSize`]), a table of devices with their free memory and rates
//! ([`Device`]) and what is wanted ([`Wish`]); nothing is asked of the machine. `--devices` and `--backend auto` call it with what
//! was found, `muser fit` with a machine that one does not have.
//!
//! A plan never takes more of a device than is free behind its reserve. The processor is the exception for weights, and says so
//! ([`Plan::from_file`]): they are read from the file map, and what memory does not hold is read from the file again and again.

mod ask;
mod device;
mod expect;
mod model;
mod place;
mod plan;
mod question;
mod refuse;
mod spec;
mod words;

pub use ask::{plan, plan_auto};
pub use device::{Card, Device, KNOWN, Kind, host, known};
pub use expect::Expected;
pub use model::{LayerSize, ModelSize};
pub use plan::{Asked, PartPlan, Plan, Wish};
pub use refuse::{NoPlan, Shortage, Way};
pub use spec::{Backend, DeviceList, DeviceSpec, parse_bytes};
pub use words::gigabytes;
