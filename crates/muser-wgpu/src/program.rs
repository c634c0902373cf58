//! What a step runs: every call of every layer, made once for the memory that it names.

use muser_backend::LayerRange;
use muser_backend::arith::attention::{Digits, hadamard_factor, score_factor};
use muser_model::Geometry;

use crate::WgpuError;
use crate::activations::Activations;
use crate::call::{Axis, Call, Counts, Maker};
use crate::device::{Buffer, Recorder};
use crate::products::{Output, Product, output_segments};
use crate::scratch::Scratch;
use crate::step_data::{RECORD, RECORDS, ROWS_AT, StepData, TOP_AT};
use crate::text::{Constant, Source, block_constants, block_text, float_number, shader};
use crate::weights::{LayerOnDevice, Weight, Weights};

use Constant::{Bool, Number};

/// How a norm's row comes about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// It is the row.
    Plain = 0,
    /// A product is added to it after its post-norm.
    Residual = 1,
    /// A product is added to it.
    Add = 2,
}

/// How heads are rotated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rotation {
    None = 0,
    /// Pairs of neighbours.
    Pairs = 1,
    /// Pairs half a head apart.
    Halves = 2,
}

/// Figures of the attention of a model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Heads {
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) dim: usize,
    pub(crate) digits: Digits,
    pub(crate) eps: f32,
}

impl Heads {
    pub(crate) fn of(g: &Geometry, digits: Digits) -> Self {
        Self { heads: g.heads, kv_heads: g.kv_heads, dim: g.head_dim, digits, eps: g.rms_eps }
    }

    /// Query heads that a workgroup takes.
    fn batch(&self) -> usize {
        let group = self.heads / self.kv_heads;
        [4, 2, 1].into_iter().find(|batch| group.is_multiple_of(*batch)).unwrap_or(1)
    }
}

/// A product: matrix, its input, where its output goes.
pub(crate) type Multiply<'a> = (&'a Weight, &'a Activations, &'a Buffer);

/// What a layer is made of.
pub(crate) struct BlockParts<'a> {
    pub(crate) step: &'a Buffer,
    pub(crate) factors: &'a Buffer,
    pub(crate) sink: &'a Buffer,
    pub(crate) heads: Heads,
    /// Norms before attention and before the feed-forward part.
    pub(crate) norms: [Norm<'a>; 2],
    /// The factors of the first one are there: they came over a cut with the rows.
    pub(crate) has_factors: bool,
    pub(crate) inputs: &'a [Multiply<'a>],
    pub(crate) query: Store<'a>,
    /// K and V go there, from there.
    pub(crate) kv: (&'a Buffer, &'a Buffer, &'a Buffer),
    pub(crate) k_norm: &'a Buffer,
    pub(crate) attend: Attend<'a>,
    pub(crate) output: Multiply<'a>,
    /// Gate, up, down.
    pub(crate) ffn: [Multiply<'a>; 3],
}

/// Calls of a layer, of a model or of a draft.
pub(crate) struct Block {
    before: Vec<Call>,
    inputs: Vec<Product>,
    attention: Vec<Call>,
    output: Product,
    between: [Call; 2],
    ffn: Vec<Product>,
    silu: Call,
    down: Product,
}

impl Block {
    pub(crate) fn new(maker: &mut Maker<'_>, b: &BlockParts<'_>) -> Result<Self, WgpuError> {
        let norm = |maker: &mut Maker<'_>, n| norm(maker, b.step, b.factors, b.sink, n);
        let product = |maker: &mut Maker<'_>, (weight, input, to): Multiply<'_>| {
            let output = Output {
                step: b.step,
                to,
                width: weight.rows,
                first_row: 0,
                count_at: ROWS_AT,
                whole: false,
            };
            Product::new(maker, weight, input, output)
        };
        let (k, v, to) = b.kv;
        let segments = |maker: &Maker<'_>, at: usize| output_segments(maker, b.inputs[at].0);
        let query = Store { segments: segments(maker, 0), ..b.query };
        let key = Store { kind: Kind::Key, part: k, weight: b.k_norm, to, factors: b.sink, ..query };
        let key = Store { segments: segments(maker, 1), ..key };
        let value = Store { kind: Kind::Value, part: v, segments: segments(maker, 2), ..key };
        let mut attention = Vec::new();
        for one in [query, key, value] {
            attention.push(store(maker, b.step, b.heads, one)?);
        }
        attention.extend(attend(maker, b.step, b.heads, b.attend)?);
        let [gate, up, down] = b.ffn;
        let [sums, apply] = norm(maker, b.norms[0])?;
        Ok(Self {
            before: if b.has_factors { vec![apply] } else { vec![sums, apply] },
            inputs: b.inputs.iter().map(|one| product(maker, *one)).collect::<Result<_, _>>()?,
            attention,
            output: product(maker, b.output)?,
            between: norm(maker, Norm { segments: output_segments(maker, b.output.0), ..b.norms[1] })?,
            ffn: vec![product(maker, gate)?, product(maker, up)?],
            silu: silu(
                maker,
                b.step,
                gate.2,
                up.2,
                [gate, up].map(|one| output_segments(maker, one.0)),
                down.1,
            )?,
            down: product(maker, down)?,
        })
    }

    /// `tap` comes when the residual stream is up to date.
    pub(crate) fn record(&self, recorder: &mut Recorder, counts: Counts, tap: impl FnOnce(&mut Recorder)) {
        self.before.iter().for_each(|call| call.record(recorder, counts));
        tap(recorder);
        self.inputs.iter().for_each(|product| product.record(recorder, counts));
        self.attention.iter().for_each(|call| call.record(recorder, counts));
        self.output.record(recorder, counts);
        self.between.iter().for_each(|call| call.record(recorder, counts));
        self.ffn.iter().for_each(|product| product.record(recorder, counts));
        self.silu.record(recorder, counts);
        self.down.record(recorder, counts);
    }
}

/// All calls of a step.
pub(crate) struct Program {
    /// None behind a cut.
    embed: Vec<Call>,
    layers: Vec<(Block, bool)>,
    /// With the last layer.
    top: Option<Top>,
    /// Before a cut: brings the residual stream up to date, and the factors of its next norm.
    cut: Option<[Call; 2]>,
}

/// Norm, vocabulary matrix, logits of top rows.
struct Top {
    norm: [Call; 2],
    output: Product,
    logits: Vec<Call>,
}

/// What calls name.
#[derive(Clone, Copy)]
pub(crate) struct Parts<'a> {
    pub(crate) geometry: &'a Geometry,
    pub(crate) weights: &'a Weights,
    pub(crate) scratch: &'a Scratch,
    pub(crate) step: &'a StepData,
    pub(crate) kv: &'a [Buffer],
    pub(crate) digits: Digits,
    /// The layers of the model that are here.
    pub(crate) range: LayerRange,
}

/// Parameters of a norm.
#[derive(Clone, Copy)]
pub(crate) struct Norm<'a> {
    pub(crate) mode: Mode,
    pub(crate) width: usize,
    pub(crate) h: &'a Buffer,
    pub(crate) o: &'a Buffer,
    pub(crate) post: &'a Buffer,
    pub(crate) weight: &'a Buffer,
    pub(crate) to: &'a Activations,
    /// Sums of `o` where a step has few rows.
    pub(crate) segments: u32,
    /// Where rows are chosen from a list: its place, their number's place, and memory for the normed rows.
    pub(crate) top: Option<(u32, &'a Buffer)>,
    pub(crate) eps: f32,
    pub(crate) post_eps: f32,
}

/// The two calls of a norm: sums over rows, then its values.
pub(crate) fn norm(
    maker: &mut Maker<'_>,
    step: &Buffer,
    factors: &Buffer,
    sink: &Buffer,
    n: Norm<'_>,
) -> Result<[Call; 2], WgpuError> {
    let mode = Number(n.mode as u32);
    let rows_at = n.top.map_or(0, |(at, _)| at);
    let source = Source::new("norm_sums", &[("MODE", mode)], &[shader!("rows"), shader!("norm_sums")]);
    let words = [n.width as u32, n.segments, ROWS_AT, rows_at, 0, n.eps.to_bits(), n.post_eps.to_bits()];
    let views = [step.into(), n.h.into(), n.o.into(), n.post.into(), factors.into()];
    let sums = maker.call(&source, &words, &views, [Axis::Fixed(1), Axis::Rows(1), Axis::Fixed(1)])?;
    let constants = [
        ("MODE", mode),
        ("STORE", Bool(n.mode != Mode::Plain && n.top.is_none())),
        ("ROW", Bool(n.top.is_some())),
    ];
    let source = Source::new("norm_apply", &constants, &[shader!("quant"), shader!("norm_apply")]);
    let a = n.to;
    let words = [n.width as u32, n.segments, ROWS_AT, rows_at, 0, a.blocks, a.forms, a.small_at];
    let views = [
        step.into(),
        factors.into(),
        n.o.into(),
        n.post.into(),
        n.weight.into(),
        n.h.into(),
        (&a.codes).into(),
        (&a.figures).into(),
        (&a.floats).into(),
        n.top.map_or(sink, |(_, row)| row).into(),
    ];
    let grid = [Axis::Fixed(n.width as u32 / 256), Axis::Rows(1), Axis::Fixed(1)];
    Ok([sums, maker.call(&source, &words, &views, grid)?])
}

/// The kernel that looks rows of a table up.
pub(crate) fn embed_source(ty: muser_gguf::GgmlType, scaled: bool) -> Option<Source> {
    let scaled = ("SCALED", Bool(scaled));
    if let Some(float) = float_number(ty) {
        let files = [shader!("float_weight"), shader!("value_float"), shader!("embed")];
        return Some(Source::new("embed", &[scaled, ("FLOAT", Number(float))], &files));
    }
    let files = [shader!("bytes"), block_text(ty), shader!("value_block"), shader!("embed")];
    let constants = [&[scaled][..], &block_constants(ty)?].concat();
    Some(Source::new("embed", &constants, &files))
}

/// Rows of the embedding table as they are, or given ones, by the step's records.
pub(crate) fn embed(
    maker: &mut Maker<'_>,
    table: &Weight,
    step: &Buffer,
    given: &Buffer,
    h: &Buffer,
) -> Result<Vec<Call>, WgpuError> {
    let Some(source) = embed_source(table.ty, table.is_scaled()) else {
        return Err(WgpuError::Unsupported(format!("no lookup for type {}", table.ty.name())));
    };
    let width = table.blocks * 256;
    let slab = |slab: &crate::weights::Slab| {
        let first = u32::from(slab.first_row == 0);
        let words = [
            width,
            table.row_bytes,
            slab.first_row,
            slab.rows,
            first,
            RECORDS,
            RECORD,
            table.scale.to_bits(),
        ];
        let views = [step.into(), (&slab.buffer).into(), given.into(), h.into()];
        maker.call(&source, &words, &views, [Axis::Fixed(table.blocks), Axis::Rows(1), Axis::Fixed(1)])
    };
    table.slabs.iter().map(slab).collect()
}

/// What of a layer heads are stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Query = 0,
    Key = 1,
    Value = 2,
}

/// Where heads come from and go to.
#[derive(Clone, Copy)]
pub(crate) struct Store<'a> {
    pub(crate) kind: Kind,
    pub(crate) rotation: Rotation,
    pub(crate) part: &'a Buffer,
    pub(crate) weight: &'a Buffer,
    pub(crate) angles: &'a Buffer,
    pub(crate) to: &'a Buffer,
    pub(crate) factors: &'a Buffer,
    /// Word of a row's record that names its place.
    pub(crate) slot: u32,
    /// Sums of `part` where a step has few rows.
    pub(crate) segments: u32,
    /// Zeros in place of what is in `part`.
    pub(crate) blank: bool,
}

/// Head norms, rotation and digits of queries, keys or values.
pub(crate) fn store(
    maker: &mut Maker<'_>,
    step: &Buffer,
    heads: Heads,
    s: Store<'_>,
) -> Result<Call, WgpuError> {
    let constants = [
        ("DIM", Number(heads.dim as u32)),
        ("DIGITS", Number(heads.digits.count() as u32)),
        ("KIND", Number(s.kind as u32)),
        ("ROTATE", Number(if s.kind == Kind::Value { 0 } else { s.rotation as u32 })),
    ];
    let source = Source::new("rope_store", &constants, &[shader!("heads"), shader!("rope_store")]);
    let count = if s.kind == Kind::Query { heads.heads } else { heads.kv_heads };
    let words = [
        count as u32,
        s.segments,
        ROWS_AT,
        RECORDS + s.slot,
        RECORD,
        u32::from(s.blank),
        heads.eps.to_bits(),
        score_factor(heads.dim, heads.digits).to_bits(),
        hadamard_factor(heads.dim).to_bits(),
    ];
    let views = [step.into(), s.part.into(), s.weight.into(), s.angles.into(), s.to.into(), s.factors.into()];
    maker.call(&source, &words, &views, [Axis::Fixed(count as u32), Axis::Rows(1), Axis::Fixed(1)])
}

/// What attention reads and writes.
#[derive(Clone, Copy)]
pub(crate) struct Attend<'a> {
    pub(crate) queries: &'a Buffer,
    pub(crate) factors: &'a Buffer,
    pub(crate) kv: &'a Buffer,
    /// A draft's own block.
    pub(crate) own: Option<&'a Buffer>,
    pub(crate) nothing: &'a Buffer,
    pub(crate) part_o: &'a Buffer,
    pub(crate) part_l: &'a Buffer,
    /// With its sums where a step has few rows.
    pub(crate) gate: Option<(&'a Buffer, u32)>,
    pub(crate) sliding: bool,
    pub(crate) to: &'a Activations,
}

/// Attention of all rows, then its sum over blocks, gated and quantised.
pub(crate) fn attend(
    maker: &mut Maker<'_>,
    step: &Buffer,
    heads: Heads,
    a: Attend<'_>,
) -> Result<[Call; 2], WgpuError> {
    let batch = heads.batch();
    let constants = [
        ("DIM", Number(heads.dim as u32)),
        ("DIGITS", Number(heads.digits.count() as u32)),
        ("BATCH", Number(batch as u32)),
        ("OWN", Bool(a.own.is_some())),
    ];
    let source = Source::new("attention", &constants, &[shader!("attention")]);
    let (table, seen, parts) = if a.sliding { (6, 13, 10) } else { (4, 5, 8) };
    let words = [heads.heads as u32, heads.kv_heads as u32, RECORDS, table, seen, parts];
    let views = [
        step.into(),
        a.queries.into(),
        a.factors.into(),
        a.kv.into(),
        a.own.unwrap_or(a.nothing).into(),
        a.part_o.into(),
        a.part_l.into(),
    ];
    let grid = [Axis::Parts, Axis::Rows(1), Axis::Fixed((heads.heads / batch) as u32)];
    let attention = maker.call(&source, &words, &views, grid)?;

    let width = (heads.heads * heads.dim) as u32;
    let constants = [("DIM", Number(heads.dim as u32)), ("GATED", Bool(a.gate.is_some()))];
    let source = Source::new("combine", &constants, &[shader!("quant"), shader!("combine")]);
    let t = a.to;
    let words = [
        width,
        heads.heads as u32,
        a.gate.map_or(1, |gate| gate.1),
        ROWS_AT,
        RECORDS,
        parts,
        t.blocks,
        t.forms,
        t.small_at,
    ];
    let views = [
        step.into(),
        a.part_o.into(),
        a.part_l.into(),
        a.factors.into(),
        a.gate.map_or(a.nothing, |gate| gate.0).into(),
        (&t.codes).into(),
        (&t.figures).into(),
        (&t.floats).into(),
    ];
    let grid = [Axis::Fixed(width / 256), Axis::Rows(1), Axis::Fixed(1)];
    Ok([attention, maker.call(&source, &words, &views, grid)?])
}

/// silu(gate) * up, quantised.
pub(crate) fn silu(
    maker: &mut Maker<'_>,
    step: &Buffer,
    gate: &Buffer,
    up: &Buffer,
    segments: [u32; 2],
    to: &Activations,
) -> Result<Call, WgpuError> {
    let source = Source::new("silu", &[], &[shader!("quant"), shader!("silu")]);
    let words = [to.blocks * 256, segments[0], segments[1], ROWS_AT, to.blocks, to.forms, to.small_at];
    let views =
        [step.into(), gate.into(), up.into(), (&to.codes).into(), (&to.figures).into(), (&to.floats).into()];
    maker.call(&source, &words, &views, [Axis::Fixed(to.blocks), Axis::Rows(1), Axis::Fixed(1)])
}

/// Logits of top rows from the product in `scratch.top`, and the best of each.
pub(crate) fn logits(maker: &mut Maker<'_>, p: Parts<'_>, output: &Weight) -> Result<Vec<Call>, WgpuError> {
    let (g, s) = (p.geometry, p.scratch);
    let groups = g.vocab.div_ceil(256) as u32;
    let source = Source::new(
        "logits",
        &[("CAPPED", Bool(g.softcap.is_some()))],
        &[shader!("ranks"), shader!("logits")],
    );
    let words = [
        g.vocab as u32,
        output_segments(maker, output),
        TOP_AT,
        groups,
        g.logit_scale.to_bits(),
        g.softcap.unwrap_or(0.0).to_bits(),
    ];
    let views = [(&p.step.device).into(), (&s.top).into(), (&s.logits).into(), (&s.best).into()];
    let logits = maker.call(&source, &words, &views, [Axis::Fixed(groups), Axis::Rows(1), Axis::Fixed(1)])?;
    let source = Source::new("argmax", &[], &[shader!("ranks"), shader!("argmax")]);
    let views = [(&s.best).into(), (&s.chosen).into()];
    let argmax = maker.call(&source, &[groups], &views, [Axis::Fixed(1), Axis::Rows(1), Axis::Fixed(1)])?;
    Ok(vec![logits, argmax])
}

impl Program {
    pub(crate) fn new(maker: &mut Maker<'_>, p: Parts<'_>) -> Result<Self, WgpuError> {
        let (g, w, s, step) = (p.geometry, p.weights, p.scratch, &p.step.device);
        let mut embedding = Vec::new();
        if let Some(table) = w.embedding.as_ref().filter(|_| p.range.has_embedding()) {
            embedding = embed(maker, table, step, &s.embeddings, &s.h)?;
            embedding.extend(Self::embedding_norm(maker, p)?);
        }
        let mut layers = Vec::with_capacity(w.layers.len());
        for index in 0..w.layers.len() {
            layers.push(Self::layer(maker, p, index)?);
        }
        let Some(last) = w.layers.last() else {
            return Err(WgpuError::Unsupported("a model without layers".to_owned()));
        };
        let behind = Norm {
            mode: Mode::Residual,
            width: g.hidden,
            h: &s.h,
            o: &s.projected,
            post: &last.post_ffw_norm,
            weight: &w.output_norm,
            to: &s.act_top,
            segments: output_segments(maker, &last.ffn_down),
            top: Some((p.step.top_at(), &s.hidden)),
            eps: g.rms_eps,
            post_eps: g.post_norm_eps,
        };
        let Some(matrix) = &w.output else {
            // What the norm makes of the rows serves nobody.
            let cut = Norm { to: &s.act_hidden, top: None, ..behind };
            let cut = norm(maker, step, &s.factors, &s.sink, cut)?;
            return Ok(Self { embed: embedding, layers, top: None, cut: Some(cut) });
        };
        let output =
            Output { step, to: &s.top, width: g.vocab as u32, first_row: 0, count_at: TOP_AT, whole: false };
        let top = Top {
            norm: norm(maker, step, &s.factors, &s.sink, behind)?,
            output: Product::new(maker, matrix, &s.act_top, output)?,
            logits: logits(maker, p, matrix)?,
        };
        Ok(Self { embed: embedding, layers, top: Some(top), cut: None })
    }

    /// The norm of the embedding, which has no weight.
    fn embedding_norm(maker: &mut Maker<'_>, p: Parts<'_>) -> Result<[Call; 2], WgpuError> {
        let (g, s, step) = (p.geometry, p.scratch, &p.step.device);
        let source =
            Source::new("norm_sums", &[("MODE", Number(0))], &[shader!("rows"), shader!("norm_sums")]);
        let words = [g.hidden as u32, 1, ROWS_AT, 0, 0, g.rms_eps.to_bits(), 0];
        let views =
            [step.into(), (&s.h).into(), (&s.nothing).into(), (&s.nothing).into(), (&s.factors).into()];
        let sums = maker.call(&source, &words, &views, [Axis::Fixed(1), Axis::Rows(1), Axis::Fixed(1)])?;
        let source = Source::new("scale_rows", &[], &[shader!("scale_rows")]);
        let views = [(&s.factors).into(), (&s.h).into()];
        let grid = [Axis::Fixed(g.hidden as u32 / 256), Axis::Rows(1), Axis::Fixed(1)];
        Ok([sums, maker.call(&source, &[g.hidden as u32], &views, grid)?])
    }

    fn layer(maker: &mut Maker<'_>, p: Parts<'_>, index: usize) -> Result<(Block, bool), WgpuError> {
        let (g, s, kv) = (p.geometry, p.scratch, &p.kv[index]);
        let l = &p.weights.layers[index];
        let before: Option<&LayerOnDevice> = index.checked_sub(1).map(|at| &p.weights.layers[at]);
        let sliding = g.sliding[p.range.first() + index];
        let first = Norm {
            mode: if index == 0 { Mode::Plain } else { Mode::Residual },
            width: g.hidden,
            h: &s.h,
            o: &s.projected,
            post: before.map_or(&s.nothing, |l| &l.post_ffw_norm),
            weight: &l.attn_norm,
            to: &s.act_hidden,
            segments: before.map_or(1, |l| output_segments(maker, &l.ffn_down)),
            top: None,
            eps: g.rms_eps,
            post_eps: g.post_norm_eps,
        };
        let second =
            Norm { mode: Mode::Residual, post: &l.post_attention_norm, weight: &l.ffn_norm, ..first };
        let parts = BlockParts {
            step: &p.step.device,
            factors: &s.factors,
            sink: &s.sink,
            heads: Heads::of(g, p.digits),
            norms: [first, second],
            has_factors: index == 0 && !p.range.has_embedding(),
            inputs: &[
                (&l.attn_q, &s.act_hidden, &s.q),
                (&l.attn_k, &s.act_hidden, &s.k),
                (&l.attn_v, &s.act_hidden, &s.v),
                (&l.attn_gate, &s.act_hidden, &s.gate),
            ],
            query: Store {
                kind: Kind::Query,
                rotation: if sliding { Rotation::Pairs } else { Rotation::None },
                part: &s.q,
                weight: &l.q_norm,
                angles: &s.angles,
                to: &s.queries,
                factors: &s.query_factors,
                slot: if sliding { 3 } else { 2 },
                segments: 1,
                blank: false,
            },
            kv: (&s.k, &s.v, kv),
            k_norm: &l.k_norm,
            attend: Attend {
                queries: &s.queries,
                factors: &s.query_factors,
                kv,
                own: None,
                nothing: &s.nothing,
                part_o: &s.part_o,
                part_l: &s.part_l,
                gate: Some((&s.gate, output_segments(maker, &l.attn_gate))),
                sliding,
                to: &s.act_attention,
            },
            output: (&l.attn_output, &s.act_attention, &s.projected),
            ffn: [
                (&l.ffn_gate, &s.act_hidden, &s.ffn_gate),
                (&l.ffn_up, &s.act_hidden, &s.ffn_up),
                (&l.ffn_down, &s.act_ffn, &s.projected),
            ],
        };
        Ok((Block::new(maker, &parts)?, sliding))
    }

    pub(crate) fn embed(&self, recorder: &mut Recorder, rows: u32) {
        self.embed.iter().for_each(|call| call.record(recorder, Counts { rows, parts: 1 }));
    }

    /// One layer; `parts` full and sliding.
    pub(crate) fn layer_calls(
        &self,
        recorder: &mut Recorder,
        index: usize,
        rows: u32,
        parts: [u32; 2],
        tap: impl FnOnce(&mut Recorder),
    ) {
        let (block, sliding) = &self.layers[index];
        block.record(recorder, Counts { rows, parts: parts[usize::from(*sliding)] }, tap);
    }

    /// The residual stream of all rows and the factors of their next norm, where a cut comes next.
    pub(crate) fn cut(&self, recorder: &mut Recorder, rows: u32) {
        let calls = self.cut.iter().flatten();
        calls.for_each(|call| call.record(recorder, Counts { rows, parts: 1 }));
    }

    /// Final norm and logits of `count` top rows; `logits`: are they wanted?
    pub(crate) fn top(&self, recorder: &mut Recorder, count: u32, logits: bool) {
        let counts = Counts { rows: count, parts: 1 };
        let Some(top) = &self.top else { return };
        top.norm.iter().for_each(|call| call.record(recorder, counts));
        if logits {
            top.output.record(recorder, counts);
            top.logits.iter().for_each(|call| call.record(recorder, counts));
        }
    }
}
