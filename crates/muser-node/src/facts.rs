//! What a node says of what it computes, from the loaded artifacts.

use muser_backend::ExecutorInfo;
use muser_backend::arith::attention::Digits;
use muser_handoff::{Component, Facts, NodeKey, Part, Plane, Planes};
use muser_kv::KvGroup;
use muser_model::{Draft, Model};
use muser_pack::Identity;

/// A node cannot take part in hand-off.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FactsError {
    /// K and V are not kept in digits.
    #[error(
        "hand-off needs K and V in 8 or 16 bits, which every backend computes alike; this engine keeps them as {found}"
    )]
    KvType {
        /// The KV type.
        found: &'static str,
    },
    /// A figure that no frame holds.
    #[error("the model's layers are none that can be handed over: {0}")]
    Planes(muser_handoff::Refusal),
}

/// The facts of an executor with these `info` that computes `model`, with this draft if it has one. `target` is the identity
/// without the draft, `whole` with it.
pub fn facts(
    model: &Model,
    draft: Option<&Draft>,
    target: &Identity,
    whole: &Identity,
    info: &ExecutorInfo,
    max_positions: u32,
) -> Result<Facts, FactsError> {
    let digits = info.kv_type.digits().ok_or(FactsError::KvType { found: info.kv_type.name() })?;
    let window = model.geometry.window.max(info.draft.map_or(0, |draft| draft.window));
    Ok(Facts {
        serves_prefill: false,
        serves_sessions: false,
        max_positions,
        identity: target.digest(),
        draft: if draft.is_some() { whole.digest() } else { [0; 32] },
        semantic: target.semantic(),
        window: window as u32,
        planes: planes(model, draft, digits).map_err(FactsError::Planes)?,
        route: target.representation.route.clone(),
        build: muser_handoff::BUILD.into(),
        parts: parts(target),
    })
}

fn planes(model: &Model, draft: Option<&Draft>, digits: Digits) -> Result<Planes, muser_handoff::Refusal> {
    let geometry = &model.geometry;
    let of_target = |group, sliding: bool| Plane {
        group,
        component: Component::Target,
        layers: geometry.sliding.iter().filter(|other| **other == sliding).count() as u16,
        heads: geometry.kv_heads as u16,
        dim: geometry.head_dim as u16,
        digits,
    };
    let of_draft = draft.map(|draft| Plane {
        group: KvGroup::Sliding,
        component: Component::Draft,
        layers: draft.layers.len() as u16,
        heads: draft.config.kv_heads as u16,
        dim: draft.config.head_dim as u16,
        digits,
    });
    let all = [of_target(KvGroup::Full, false), of_target(KvGroup::Sliding, true)];
    Planes::new(all.into_iter().chain(of_draft).filter(|plane| plane.layers > 0).collect())
}

/// What two nodes that do not fit can name as the reason.
fn parts(identity: &Identity) -> Vec<Part> {
    let kept = &identity.representation;
    let digest = |bytes: &[u8]| *blake3::hash(bytes).as_bytes();
    let part = |name: &str, shown: String, digest| Part { name: name.into(), shown, digest };
    let short = |digest: &[u8; 32]| NodeKey(*digest).to_string()[..8].to_owned();
    let shown = |name: &str, value: &str| part(name, value.into(), digest(value.as_bytes()));
    let of = |name: &str, value: &[u8; 32]| part(name, short(value), *value);
    vec![
        of("weights", &identity.weights),
        of("architecture", &digest(&identity.architecture)),
        of("tokenizer", &identity.tokenizer),
        of("chat template", &identity.template),
        shown("numeric route", &kept.route),
        shown("KV type", &kept.kv_type),
        shown("layout", &kept.layout),
    ]
}
