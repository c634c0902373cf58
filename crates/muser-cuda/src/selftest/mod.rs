//! Self-test of the kernels: everything whose result is defined to the bit, against scalar code.
//!
//! [`run`] is thorough and takes about a second. A short form of it runs whenever an executor is made, with the weight types
//! of its model; [`SKIP_VARIABLE`] leaves it out.

mod draft;
mod products;
mod steps;

use std::sync::Arc;

use muser_backend::conformance::Random;
use muser_gguf::GgmlType;

use crate::CudaError;
use crate::driver::{Context, Stream};
use crate::executor::Kernels;
use crate::matrix::{AnyKind, ProductKernels};
use products::Extent;

/// Environment variable that, when set, skips the check at start-up.
pub const SKIP_VARIABLE: &str = "MUSER_SKIP_SELFTEST";

/// What was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Values compared; all agreed, bit by bit but for attention on tensor cores.
    pub compared: usize,
}

/// Runs every check on device `index`.
pub fn run(index: usize) -> Result<Report, CudaError> {
    let context = Context::open(index)?;
    let kernels = Kernels::load(&context)?;
    let products = kernels.products(&context)?;
    let stream = Stream::new(&context)?;
    let card = Card { context: &context, kernels: &kernels, products: &products, stream: &stream };
    let mut random = Random::new(7);
    let compared = products::check(&card, &products::all_types(), Extent::FULL, &mut random)?;
    let steps = steps::check(&card, &mut random)? + draft::select(&card, &mut random)?;
    Ok(Report { compared: compared + steps + draft::check(&card, &mut random)? })
}

/// The short form, for products of these weight types.
pub(crate) fn at_start(card: &Card<'_>, types: &[GgmlType]) -> Result<Report, CudaError> {
    let mut random = Random::new(8);
    let mut products: Vec<Vec<GgmlType>> =
        types.iter().filter(|ty| AnyKind::of(**ty).is_some()).map(|ty| vec![*ty]).collect();
    let pair = [GgmlType::Q4_K, GgmlType::Q6_K];
    if pair.iter().all(|ty| types.contains(ty)) {
        products.push(pair.to_vec());
    }
    let compared = products::check(card, &products, Extent::BRIEF, &mut random)?;
    let steps = steps::check(card, &mut random)? + draft::select(card, &mut random)?;
    Ok(Report { compared: compared + steps })
}

/// What a draft needs besides, with products of weight types that its target does not have.
pub(crate) fn of_draft(card: &Card<'_>, types: &[GgmlType]) -> Result<Report, CudaError> {
    let mut random = Random::new(9);
    let products: Vec<Vec<GgmlType>> =
        types.iter().filter(|ty| AnyKind::of(**ty).is_some()).map(|ty| vec![*ty]).collect();
    let compared = products::check(card, &products, Extent::BRIEF, &mut random)?;
    Ok(Report { compared: compared + draft::check(card, &mut random)? })
}

/// What checks run on.
#[derive(Clone, Copy)]
pub(crate) struct Card<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) kernels: &'a Kernels,
    pub(crate) products: &'a ProductKernels,
    pub(crate) stream: &'a Stream,
}
