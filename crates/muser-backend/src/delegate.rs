//! Executors that wrap another one, and executors that lack a faculty.

/// What the macros' signatures name.
#[doc(hidden)]
pub mod types {
    pub use muser_kv::{BlockId, KvGroup};
    pub use muser_model::{Draft, Projector};
}

/// Writes methods of [`crate::Executor`], [`crate::DraftExecutor`] and [`crate::TowerExecutor`] that only forward, by name. All
/// methods of these traits are required, so what is neither named nor written does not compile:
///
/// ```
/// use muser_backend::{Executor, TowerExecutor, delegate_executor};
///
/// struct Logged(Box<dyn Executor>);
///
/// impl TowerExecutor for Logged {
///     delegate_executor!(self => self.0; attach_projector, tower, begin_image, encode_image);
///
///     fn drop_image(&mut self) {
///         println!("a picture is given up");
///         self.0.drop_image();
///     }
/// }
/// ```
///
/// ```compile_fail,E0046
/// use muser_backend::{Executor, TowerExecutor, delegate_executor};
///
/// struct Forgetful(Box<dyn Executor>);
///
/// impl TowerExecutor for Forgetful {
///     delegate_executor!(self => self.0; attach_projector, tower, begin_image, encode_image);
/// }
/// ```
#[macro_export]
macro_rules! delegate_executor {
    (one $this:ident $inner:expr, info) => {
        fn info(&$this) -> &$crate::ExecutorInfo {
            $inner.info()
        }
    };
    (one $this:ident $inner:expr, allocate_kv) => {
        fn allocate_kv(&mut $this, capacity: $crate::KvCapacity) -> Result<(), $crate::ExecError> {
            $inner.allocate_kv(capacity)
        }
    };
    (one $this:ident $inner:expr, step) => {
        fn step(&mut $this, batch: &$crate::StepBatch, out: &mut $crate::StepOutput) -> Result<(), $crate::ExecError> {
            $inner.step(batch, out)
        }
    };
    (one $this:ident $inner:expr, most_candidates) => {
        fn most_candidates(&$this) -> usize {
            $inner.most_candidates()
        }
    };
    (one $this:ident $inner:expr, read_bandwidth) => {
        fn read_bandwidth(&$this) -> Result<Option<f64>, $crate::ExecError> {
            $inner.read_bandwidth()
        }
    };
    (one $this:ident $inner:expr, export_block) => {
        fn export_block(&$this, group: $crate::types::KvGroup, block: $crate::types::BlockId, dst: &mut [u8]) -> Result<(), $crate::ExecError> {
            $inner.export_block(group, block, dst)
        }
    };
    (one $this:ident $inner:expr, clear_rows) => {
        fn clear_rows(&$this, group: $crate::types::KvGroup, rows: usize, bytes: &mut [u8]) {
            $inner.clear_rows(group, rows, bytes);
        }
    };
    (one $this:ident $inner:expr, import_block) => {
        fn import_block(&mut $this, group: $crate::types::KvGroup, block: $crate::types::BlockId, src: &[u8]) -> Result<(), $crate::ExecError> {
            $inner.import_block(group, block, src)
        }
    };
    (one $this:ident $inner:expr, lend_block) => {
        fn lend_block(&mut $this, group: $crate::types::KvGroup, block: $crate::types::BlockId) -> Option<Box<dyn $crate::LentBlock>> {
            $inner.lend_block(group, block)
        }
    };
    (one $this:ident $inner:expr, attach_draft) => {
        fn attach_draft(&mut $this, draft: $crate::types::Draft) -> Result<(), $crate::ExecError> {
            $inner.attach_draft(draft)
        }
    };
    (one $this:ident $inner:expr, draft) => {
        fn draft(&mut $this, batch: &$crate::DraftBatch, logits: &mut Vec<f32>) -> Result<(), $crate::ExecError> {
            $inner.draft(batch, logits)
        }
    };
    (one $this:ident $inner:expr, draft_largest) => {
        fn draft_largest(&mut $this, batch: &$crate::DraftBatch, scratch: &mut Vec<f32>, ids: &mut Vec<Option<u32>>) -> Result<(), $crate::ExecError> {
            $inner.draft_largest(batch, scratch, ids)
        }
    };
    (one $this:ident $inner:expr, has_draft_context) => {
        fn has_draft_context(&$this, block: $crate::types::BlockId, row: usize) -> bool {
            $inner.has_draft_context(block, row)
        }
    };
    (one $this:ident $inner:expr, attach_projector) => {
        fn attach_projector(&mut $this, projector: $crate::types::Projector, rule: $crate::arith::vision::PositionRule) -> Result<(), $crate::ExecError> {
            $inner.attach_projector(projector, rule)
        }
    };
    (one $this:ident $inner:expr, tower) => {
        fn tower(&$this) -> Option<&$crate::TowerInfo> {
            $inner.tower()
        }
    };
    (one $this:ident $inner:expr, begin_image) => {
        fn begin_image(&mut $this, image: &$crate::TowerImage) -> Result<(), $crate::ExecError> {
            $inner.begin_image(image)
        }
    };
    (one $this:ident $inner:expr, encode_image) => {
        fn encode_image(&mut $this, time: std::time::Duration, rows: &mut Vec<f32>) -> Result<bool, $crate::ExecError> {
            $inner.encode_image(time, rows)
        }
    };
    (one $this:ident $inner:expr, drop_image) => {
        fn drop_image(&mut $this) {
            $inner.drop_image();
        }
    };
    ($this:ident => $inner:expr; $($name:ident),+ $(,)?) => {
        $($crate::delegate_executor!(one $this $inner, $name);)+
    };
}

/// For an executor that cannot draft.
#[macro_export]
macro_rules! no_drafts {
    ($executor:ty) => {
        impl $crate::DraftExecutor for $executor {
            fn attach_draft(&mut self, _: $crate::types::Draft) -> Result<(), $crate::ExecError> {
                Err($crate::no_draft(self))
            }
            fn draft(&mut self, _: &$crate::DraftBatch, _: &mut Vec<f32>) -> Result<(), $crate::ExecError> {
                Err($crate::no_draft(self))
            }
            fn draft_largest(
                &mut self,
                _: &$crate::DraftBatch,
                _: &mut Vec<f32>,
                _: &mut Vec<Option<u32>>,
            ) -> Result<(), $crate::ExecError> {
                Err($crate::no_draft(self))
            }
            fn has_draft_context(&self, _: $crate::types::BlockId, _: usize) -> bool {
                true
            }
        }
    };
}

/// For an executor without a vision tower.
#[macro_export]
macro_rules! no_tower {
    ($executor:ty) => {
        impl $crate::TowerExecutor for $executor {
            fn attach_projector(
                &mut self,
                _: $crate::types::Projector,
                _: $crate::arith::vision::PositionRule,
            ) -> Result<(), $crate::ExecError> {
                let backend = $crate::Executor::info(self).backend;
                Err($crate::ExecError::Unsupported { backend, what: "vision towers".into() })
            }
            fn tower(&self) -> Option<&$crate::TowerInfo> {
                None
            }
            fn begin_image(&mut self, _: &$crate::TowerImage) -> Result<(), $crate::ExecError> {
                Err($crate::no_tower())
            }
            fn encode_image(
                &mut self,
                _: std::time::Duration,
                _: &mut Vec<f32>,
            ) -> Result<bool, $crate::ExecError> {
                Err($crate::no_tower())
            }
            fn drop_image(&mut self) {}
        }
    };
}

/// What an executor without a draft answers.
#[doc(hidden)]
pub fn no_draft(executor: &dyn crate::Executor) -> crate::ExecError {
    crate::ExecError::Unsupported { backend: executor.info().backend, what: "DFlash drafts".into() }
}
