//! Matrix products: which kernel takes a matrix, for one row and for several.

use crate::WgpuError;
use crate::activations::Activations;
use crate::call::{Axis, Call, Counts, Maker};
use crate::device::{Buffer, Recorder};
use crate::text::{Constant, Source, block_constants, block_text, float_number, shader};
use crate::weights::{Slab, Weight, form_of};

/// Activation rows that a workgroup takes when there are several.
const TOKENS: u32 = 4;

/// A product of every step.
pub(crate) struct Product {
    one: Vec<Call>,
    many: Vec<Call>,
}

/// Where a product's output goes: `[rows][width]`, its number of rows at `count_at` of the step's data.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a> {
    pub(crate) step: &'a Buffer,
    pub(crate) to: &'a Buffer,
    pub(crate) width: u32,
    pub(crate) first_row: u32,
    pub(crate) count_at: u32,
}

/// The kernel of every type, for so many activation rows at a time.
pub(crate) fn any_source(ty: muser_gguf::GgmlType, scaled: bool, tokens: u32) -> Option<Source> {
    let shared = [("SCALED", Constant::Bool(scaled)), ("TOKENS", Constant::Number(tokens))];
    if let Some(float) = float_number(ty) {
        let constants = [&shared[..], &[("FLOAT", Constant::Number(float))]].concat();
        return Some(Source::new(
            "product_float",
            &constants,
            &[shader!("float_weight"), shader!("product_float")],
        ));
    }
    let constants = [&shared[..], &block_constants(ty)?].concat();
    Some(Source::new("product_any", &constants, &[shader!("bytes"), block_text(ty), shader!("product_any")]))
}

impl Product {
    pub(crate) fn new(
        maker: &mut Maker<'_>,
        weight: &Weight,
        input: &Activations,
        output: Output<'_>,
    ) -> Result<Self, WgpuError> {
        let mut calls = |tokens: u32| -> Result<Vec<Call>, WgpuError> {
            weight.slabs.iter().map(|slab| any(maker, weight, slab, input, output, tokens)).collect()
        };
        Ok(Self { one: calls(1)?, many: calls(TOKENS)? })
    }

    pub(crate) fn record(&self, recorder: &mut Recorder, counts: Counts) {
        let calls = if counts.rows == 1 { &self.one } else { &self.many };
        calls.iter().for_each(|call| call.record(recorder, counts));
    }
}

fn any(
    maker: &mut Maker<'_>,
    weight: &Weight,
    slab: &Slab,
    input: &Activations,
    output: Output<'_>,
    tokens: u32,
) -> Result<Call, WgpuError> {
    let scaled = weight.is_scaled();
    let Some(source) = any_source(weight.ty, scaled, tokens) else {
        return Err(WgpuError::Unsupported(format!("no kernel for type {}", weight.ty.name())));
    };
    let float = float_number(weight.ty).is_some();
    let small = form_of(weight.ty) == 2;
    let words = [
        weight.row_bytes,
        slab.rows,
        weight.blocks,
        weight.segments,
        output.width,
        output.first_row + slab.first_row,
        output.count_at,
        if small { input.small_at } else { 0 },
        weight.scale.to_bits(),
    ];
    let grid =
        [Axis::Fixed(slab.rows.div_ceil(if float { 16 } else { 8 })), Axis::Rows(tokens), Axis::Fixed(1)];
    if float {
        let views = [output.step.into(), (&slab.buffer).into(), (&input.floats).into(), output.to.into()];
        return maker.call(&source, &words, &views, grid);
    }
    let views = [
        output.step.into(),
        (&slab.buffer).into(),
        (&input.codes).into(),
        (&input.figures).into(),
        output.to.into(),
    ];
    maker.call(&source, &words, &views, grid)
}
