//! What a checkpoint says about its quantisation: which kinds of matrices there are, and which are none.
//!
//! Tensors tell by themselves what they are ([`crate::source`]). This is the second witness: a matrix of a kind that the
//! settings do not have, or that they leave out, is refused.

use std::collections::{BTreeSet, HashMap};

use serde_json::Value;

use crate::ConvertError;
use crate::checkpoint::Checkpoint;
use crate::error::wrong;

/// How a matrix is quantised.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Kind {
    Nvfp4,
    /// E4M3 with one scale for the tensor.
    Fp8Tensor,
    /// One for each row.
    Fp8Channel,
    /// One for each 128 rows and inputs.
    Fp8Block,
    /// One power of two for each 32 inputs.
    Mxfp8,
}

impl Kind {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Kind::Nvfp4 => "NVFP4",
            Kind::Fp8Tensor => "FP8 with one scale",
            Kind::Fp8Channel => "FP8 with a scale for each row",
            Kind::Fp8Block => "FP8 in blocks of 128 x 128",
            Kind::Mxfp8 => "MXFP8",
        }
    }
}

/// The settings.
#[derive(Default)]
pub(crate) struct Scheme {
    /// Where they are; `None` if there are none.
    place: Option<&'static str>,
    kinds: BTreeSet<Kind>,
    /// Kinds by module, if they are given like that.
    of_module: HashMap<String, Kind>,
    /// Modules that are left as they are, by their whole names.
    ignored: BTreeSet<String>,
}

impl Scheme {
    /// Reads them from `config.json`, or from the file that ModelOpt writes beside it.
    pub(crate) fn of(checkpoint: &Checkpoint) -> Result<Scheme, ConvertError> {
        let config = &checkpoint.config;
        let inside = [config.get("quantization_config"), config.pointer("/text_config/quantization_config")];
        if let Some(settings) = inside.into_iter().flatten().find(|value| !value.is_null()) {
            return Scheme::parse(settings, "config.json: quantization_config");
        }
        match checkpoint.settings("hf_quant_config.json")? {
            Some(file) => {
                let settings = file.get("quantization").unwrap_or(&file);
                Scheme::parse(settings, "hf_quant_config.json")
            }
            None => Ok(Scheme::default()),
        }
    }

    /// Checks a matrix that is quantised.
    pub(crate) fn check(&self, module: &str, kind: Kind) -> Result<(), ConvertError> {
        let place = format!("module {module}");
        let found = || kind.name().to_owned();
        let Some(settings) = self.place else {
            return Err(wrong(
                place,
                "no quantised tensors, since the checkpoint has no settings for them",
                found(),
            ));
        };
        if self.ignored.contains(module) {
            return Err(wrong(place, format!("plain floats, since {settings} leaves it out"), found()));
        }
        if let Some(&said) = self.of_module.get(module)
            && said != kind
        {
            return Err(wrong(place, format!("{}, as {settings} says", said.name()), found()));
        }
        if !self.kinds.contains(&kind) {
            let kinds: Vec<_> = self.kinds.iter().map(|kind| kind.name()).collect();
            return Err(wrong(place, format!("{}, as {settings} says", kinds.join(" or ")), found()));
        }
        Ok(())
    }

    fn parse(settings: &Value, place: &'static str) -> Result<Scheme, ConvertError> {
        let mut scheme = Scheme { place: Some(place), ..Scheme::default() };
        for other in ["transform_config", "sparsity_config"] {
            let found =
                settings.get(other).filter(|value| !value.is_null() && *value != &serde_json::json!({}));
            if let Some(found) = found {
                return Err(wrong(format!("{place}: {other}"), "nothing", found.to_string()));
            }
        }
        for list in ["ignore", "exclude_modules", "modules_to_not_convert"] {
            let names = settings.get(list).and_then(Value::as_array).into_iter().flatten();
            scheme.ignored.extend(names.filter_map(Value::as_str).map(str::to_owned));
        }
        let method = settings.get("quant_method").and_then(Value::as_str);
        let algorithm = settings.get("quant_algo").and_then(Value::as_str);
        if let Some(layers) = settings.get("quantized_layers").and_then(Value::as_object) {
            for (module, layer) in layers {
                let algorithm = layer.get("quant_algo").and_then(Value::as_str).unwrap_or("none");
                let kind = of_algorithm(algorithm, place)?;
                scheme.kinds.insert(kind);
                scheme.of_module.insert(module.clone(), kind);
            }
        }
        if let Some(algorithm) = algorithm.filter(|name| *name != "MIXED_PRECISION") {
            scheme.kinds.insert(of_algorithm(algorithm, place)?);
        } else if let Some(groups) = settings.get("config_groups").and_then(Value::as_object) {
            for (name, group) in groups {
                scheme.kinds.insert(of_group(group, &format!("{place}: config_groups.{name}"))?);
            }
        } else if method == Some("fp8") {
            scheme.kinds.insert(match block_of(settings.get("weight_block_size")) {
                None => Kind::Fp8Tensor,
                Some([128, 128]) => Kind::Fp8Block,
                Some(other) => return Err(wrong(place, "blocks of 128 x 128", format!("{other:?}"))),
            });
        }
        if scheme.kinds.is_empty() {
            let found = method.or(algorithm).unwrap_or("no method");
            return Err(wrong(place, "compressed-tensors, modelopt or fp8 with their settings", found));
        }
        Ok(scheme)
    }
}

/// ModelOpt's names.
fn of_algorithm(name: &str, place: &str) -> Result<Kind, ConvertError> {
    Ok(match name.to_ascii_uppercase().as_str() {
        "NVFP4" | "W4A16_NVFP4" => Kind::Nvfp4,
        "FP8" => Kind::Fp8Tensor,
        "FP8_PER_CHANNEL_PER_TOKEN" => Kind::Fp8Channel,
        "FP8_PB_WO" | "FP8_PB_REAL" => Kind::Fp8Block,
        "MXFP8" => Kind::Mxfp8,
        _ => {
            let expected =
                "quant_algo NVFP4, W4A16_NVFP4, FP8, FP8_PER_CHANNEL_PER_TOKEN, FP8_PB_WO or MXFP8";
            return Err(wrong(place, expected, name));
        }
    })
}

/// A group of compressed-tensors.
fn of_group(group: &Value, place: &str) -> Result<Kind, ConvertError> {
    let weights = group.get("weights").unwrap_or(&Value::Null);
    let number = |name: &str| weights.get(name).and_then(Value::as_u64);
    let text = |name: &str| weights.get(name).and_then(Value::as_str).unwrap_or("");
    let symmetric = weights.get("symmetric").and_then(Value::as_bool).unwrap_or(true);
    let kind = match (number("num_bits"), text("type"), text("strategy"), number("group_size")) {
        (Some(4), "float", "tensor_group" | "group" | "", Some(16)) => Some(Kind::Nvfp4),
        (Some(8), "float", "group" | "", Some(32)) => Some(Kind::Mxfp8),
        (Some(8), "float", "tensor" | "", None) => Some(Kind::Fp8Tensor),
        (Some(8), "float", "channel", _) => Some(Kind::Fp8Channel),
        (Some(8), "float", "block", _) if block_of(weights.get("block_structure")) == Some([128, 128]) => {
            Some(Kind::Fp8Block)
        }
        _ => None,
    };
    kind.filter(|_| symmetric).ok_or_else(|| {
        let expected =
            "weights of NVFP4 (4 bits, groups of 16), FP8 (tensor, channel, blocks of 128 x 128) or MXFP8";
        wrong(place, expected, weights.to_string())
    })
}

fn block_of(value: Option<&Value>) -> Option<[u64; 2]> {
    match value?.as_array()?.as_slice() {
        [rows, cols] => Some([rows.as_u64()?, cols.as_u64()?]),
        _ => None,
    }
}
