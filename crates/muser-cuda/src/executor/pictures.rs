//! Taking a vision tower in, and its pictures: what the executor does for [`crate::tower`].

use std::time::Duration;

use muser_backend::arith::vision::PositionRule;
use muser_backend::{ExecError, TowerExecutor, TowerImage, TowerInfo, check_projector, no_tower};
use muser_gguf::GgmlType;
use muser_model::Projector;

use super::{CudaExecutor, types_of, weight_types};
use crate::CudaError;
use crate::selftest::{self, Card};
use crate::tower::Tower;

impl CudaExecutor {
    fn load_tower(&mut self, projector: Projector, rule: PositionRule) -> Result<Tower, CudaError> {
        if std::env::var_os(selftest::SKIP_VARIABLE).is_none() {
            let tested = weight_types(&self.model);
            let types = types_of(projector.matrices()).into_iter();
            let new: Vec<GgmlType> = types.filter(|ty| !tested.contains(ty)).collect();
            let (context, kernels) = (&self.context, &self.kernels);
            // Its own products: those of the executor may round.
            let products = kernels.products(context)?;
            let card = Card { context, kernels, products: &products, stream: &self.stream };
            let compared = selftest::of_tower(&card, &new)?.compared;
            tracing::debug!(compared, "the tower's kernels are right");
        }
        Tower::new(&self.context, &self.kernels, projector, rule)
    }
}

impl TowerExecutor for CudaExecutor {
    fn attach_projector(&mut self, projector: Projector, rule: PositionRule) -> Result<(), ExecError> {
        check_projector(&projector, &self.geometry, "cuda")?;
        // Its memory goes first.
        self.tower = None;
        self.context.bind().map_err(|e| self.fail(e))?;
        self.tower = Some(self.load_tower(projector, rule).map_err(|e| self.fail(e))?);
        self.note_room().map_err(|e| self.fail(e))
    }

    fn tower(&self) -> Option<&TowerInfo> {
        self.tower.as_ref().map(|tower| &tower.info)
    }

    fn begin_image(&mut self, image: &TowerImage) -> Result<(), ExecError> {
        self.context.bind().map_err(|e| e.into_exec(&self.info.device))?;
        self.tower.as_mut().ok_or_else(no_tower)?.begin(image, &self.info.device)
    }

    fn encode_image(&mut self, time: Duration, rows: &mut Vec<f32>) -> Result<bool, ExecError> {
        let tower = self.tower.as_mut().ok_or_else(no_tower)?;
        self.context.bind().map_err(|e| e.into_exec(&self.info.device))?;
        let _settle = self.stream.settle_at_end();
        tower.encode(&self.stream, time, rows, &self.info.device)
    }

    fn drop_image(&mut self) {
        if let Some(tower) = &mut self.tower {
            tower.drop_image();
        }
    }
}
