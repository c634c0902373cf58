//! Matrix products: which kernel takes a matrix, for one row and for several.

use crate::WgpuError;
use crate::activations::Activations;
use crate::call::{Axis, Call, Counts, Maker};
use crate::device::{Buffer, Recorder, View};
use crate::eight::{self, FEW_ROWS};
use crate::text::{Constant, Source, block_constants, block_text, float_number, shader};
use crate::weights::{Slab, Weight, form_of};

/// Activation rows that a workgroup takes when there are several.
const TOKENS: u32 = 4;

/// A product of every step.
pub(crate) struct Product {
    /// For up to one, two, four, eight rows at a time; none where a type has no such kernel.
    few: Vec<(u32, Vec<Call>)>,
    one: Vec<Call>,
    many: Vec<Call>,
}

/// Sums of a product's output where a step has few rows.
pub(crate) fn output_segments(maker: &Maker<'_>, weight: &Weight) -> u32 {
    if takes(maker, weight) { weight.segments } else { 1 }
}

/// Is there a kernel of few rows for a matrix?
fn takes(maker: &Maker<'_>, weight: &Weight) -> bool {
    !maker.library.plain && !weight.is_scaled() && eight::takes(weight.ty, maker.device.facts.subgroups)
}

/// Where a product's output goes: `[rows][width]`, its number of rows at `count_at` of the step's data.
#[derive(Clone, Copy)]
pub(crate) struct Output<'a> {
    pub(crate) step: &'a Buffer,
    pub(crate) to: &'a Buffer,
    pub(crate) width: u32,
    pub(crate) first_row: u32,
    pub(crate) count_at: u32,
    /// One value for each row of weights, whatever the step: its reader adds no segments.
    pub(crate) whole: bool,
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
        let (one, many) = (calls(1)?, calls(TOKENS)?);
        let mut few = Vec::new();
        if !output.whole && takes(maker, weight) {
            for tokens in eight::TOKENS {
                let source = eight::source(weight.ty, tokens);
                let call = |slab: &Slab| {
                    let grid = [
                        Axis::Fixed(slab.rows.div_ceil(eight::tile(tokens))),
                        Axis::Fixed(weight.segments),
                        Axis::Rows(tokens),
                    ];
                    maker.call(&source, &words(weight, slab, output, 0), &views(slab, input, output), grid)
                };
                few.push((tokens, weight.slabs.iter().map(call).collect::<Result<_, _>>()?));
            }
        }
        Ok(Self { few, one, many })
    }

    pub(crate) fn record(&self, recorder: &mut Recorder, counts: Counts) {
        if counts.rows <= FEW_ROWS {
            let fits = self.few.iter().find(|(tokens, _)| counts.rows <= *tokens);
            if let Some((_, calls)) = fits.or(self.few.last()) {
                calls.iter().for_each(|call| call.record(recorder, counts));
                return;
            }
        }
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
    let small_at = if form_of(weight.ty) == 2 { input.small_at } else { 0 };
    let words = words(weight, slab, output, small_at);
    let grid =
        [Axis::Fixed(slab.rows.div_ceil(if float { 16 } else { 8 })), Axis::Rows(tokens), Axis::Fixed(1)];
    if float {
        let views = [output.step.into(), (&slab.buffer).into(), (&input.floats).into(), output.to.into()];
        return maker.call(&source, &words, &views, grid);
    }
    maker.call(&source, &words, &views(slab, input, output), grid)
}

/// Parameters of all products.
fn words(weight: &Weight, slab: &Slab, output: Output<'_>, small_at: u32) -> [u32; 9] {
    [
        weight.row_bytes,
        slab.rows,
        weight.blocks,
        weight.segments,
        output.width,
        output.first_row + slab.first_row,
        output.count_at,
        small_at,
        weight.scale.to_bits(),
    ]
}

/// Bindings of products of codes.
fn views<'a>(slab: &'a Slab, input: &'a Activations, output: Output<'a>) -> [View<'a>; 5] {
    let (weights, codes) = ((&slab.buffer).into(), (&input.codes).into());
    [output.step.into(), weights, codes, (&input.figures).into(), output.to.into()]
}
