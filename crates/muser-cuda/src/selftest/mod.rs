//! Self-test of the kernels: everything whose result is defined to the bit, against scalar code.
//!
//! [`run`] is thorough and takes about a second. A short form of it runs whenever an executor is made, with the weight types
//! of its model; [`SKIP_VARIABLE`] leaves it out.

mod digits;
mod draft;
mod products;
mod rounded;
mod steps;
mod tower;
mod tower_times;

use std::sync::Arc;

use muser_backend::arith::attention::Digits;
use muser_backend::conformance::Random;
use muser_gguf::GgmlType;

use crate::CudaError;
use crate::driver::{Context, Stream};
use crate::loaded::Kernels;
use crate::matrix::{AnyKind, Prefill, ProductKernels, Tile};
use products::Extent;
pub use tower_times::tower_times;

/// Environment variable that, when set, skips the check at start-up.
pub const SKIP_VARIABLE: &str = "MUSER_SKIP_SELFTEST";

/// What was compared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Values compared; all agreed, bit by bit.
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
    let compared = compared + products::check(&card, &products::all_types(), Extent::LONG, &mut random)?;
    let compared = compared + rounding(&card, &rounded::TYPES, &mut random)?;
    let steps = steps::check(&card, &mut random)? + draft::select(&card, &mut random)?;
    let mut of_widths = 0;
    for digits in [Digits::Two, Digits::One] {
        of_widths += digits::check(&card, digits, &mut random)? + draft::check(&card, digits, &mut random)?;
    }
    let of_tower = tower::check(&card, &mut random)?;
    Ok(Report { compared: compared + steps + of_widths + of_tower })
}

/// Products of many rows with weights rounded to 8 bits, where the card has kernels for that.
fn rounding(card: &Card<'_>, types: &[GgmlType], random: &mut Random) -> Result<usize, CudaError> {
    let mut products = card.kernels.products(card.context)?;
    products.set_prefill(Prefill::Fast);
    if !products.rounds() {
        return Ok(0);
    }
    let types: Vec<_> = types.iter().filter(|ty| rounded::TYPES.contains(ty)).map(|ty| vec![*ty]).collect();
    products::check(&Card { products: &products, ..*card }, &types, Extent::ROUNDED, random)
}

/// The short form, for products of these weight types and K and V of these digits.
pub(crate) fn at_start(
    card: &Card<'_>,
    types: &[GgmlType],
    prefill: Prefill,
    digits: Digits,
) -> Result<Report, CudaError> {
    let mut random = Random::new(8);
    let mut products: Vec<Vec<GgmlType>> =
        types.iter().filter(|ty| AnyKind::of(**ty).is_some()).map(|ty| vec![*ty]).collect();
    let pair = [GgmlType::Q4_K, GgmlType::Q6_K];
    if pair.iter().all(|ty| types.contains(ty)) {
        products.push(pair.to_vec());
    }
    let mut compared = products::check(card, &products, Extent::BRIEF, &mut random)?;
    products.retain(|types| types.iter().any(|ty| Tile::of(*ty).is_some_and(|tile| !tile.small_blocks())));
    compared += products::check(card, &products, Extent::LONG_BRIEF, &mut random)?;
    if prefill == Prefill::Fast {
        compared += rounding(card, types, &mut random)?;
    }
    let steps = steps::check(card, &mut random)? + draft::select(card, &mut random)?;
    let steps = steps + digits::check(card, digits, &mut random)?;
    Ok(Report { compared: compared + steps })
}

/// What a draft needs besides, with products of weight types that its target does not have.
pub(crate) fn of_draft(card: &Card<'_>, types: &[GgmlType], digits: Digits) -> Result<Report, CudaError> {
    let mut random = Random::new(9);
    let products: Vec<Vec<GgmlType>> =
        types.iter().filter(|ty| AnyKind::of(**ty).is_some()).map(|ty| vec![*ty]).collect();
    let compared = products::check(card, &products, Extent::BRIEF, &mut random)?;
    Ok(Report { compared: compared + draft::check(card, digits, &mut random)? })
}

/// What a vision tower needs besides, with products of weight types that the model does not have.
pub(crate) fn of_tower(card: &Card<'_>, types: &[GgmlType]) -> Result<Report, CudaError> {
    let mut random = Random::new(10);
    let products: Vec<Vec<GgmlType>> =
        types.iter().filter(|ty| AnyKind::of(**ty).is_some()).map(|ty| vec![*ty]).collect();
    let compared = products::check(card, &products, Extent::BRIEF, &mut random)?;
    Ok(Report { compared: compared + tower::check(card, &mut random)? })
}

/// What checks run on.
#[derive(Clone, Copy)]
pub(crate) struct Card<'a> {
    pub(crate) context: &'a Arc<Context>,
    pub(crate) kernels: &'a Kernels,
    pub(crate) products: &'a ProductKernels,
    pub(crate) stream: &'a Stream,
}
