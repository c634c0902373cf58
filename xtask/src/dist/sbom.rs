//! The bill of materials: CycloneDX 1.6 as JSON, of the executable's packages and the weights that come with it.

use std::path::Path;

use anyhow::{Context as _, Result};
use serde_json::{Value, json};

use super::contents::BUNDLED;
use super::dependencies::Package;
use super::options::Target;
use super::sha256;

/// Files of weights: the one inside the executable, and those beside it.
const WEIGHTS: [&str; 3] = [BUNDLED, "muse-tiny-dflash-Q8_0.gguf.zst", "mmproj-muse-tiny-Q8_0.gguf.zst"];

pub(crate) fn document(
    root: &Path,
    version: &str,
    target: &Target,
    time: u64,
    packages: &[Package],
) -> Result<Vec<u8>> {
    let main = packages.iter().find(|package| package.ours && package.name == "muser");
    let main = main.context("the list has no package muser")?;
    let mut components: Vec<Value> =
        packages.iter().filter(|package| package.name != "muser").map(component).collect();
    let mut roots: Vec<String> = main.needs.iter().cloned().collect();
    for name in WEIGHTS {
        let bytes = std::fs::read(root.join("models").join(name)).with_context(|| name.to_owned())?;
        roots.push(format!("models/{name}"));
        components.push(json!({
            "type": "machine-learning-model",
            "bom-ref": format!("models/{name}"),
            "name": name,
            "version": version,
            "hashes": [{"alg": "SHA-256", "content": sha256(&bytes)}],
            "licenses": [{"license": {"id": "Apache-2.0"}}],
        }));
    }
    let mut dependencies = vec![json!({"ref": main.reference(), "dependsOn": roots})];
    let others = packages.iter().filter(|package| package.name != "muser");
    dependencies
        .extend(others.map(|package| json!({"ref": package.reference(), "dependsOn": package.needs})));
    let document = json!({
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": timestamp(time),
            "component": {
                "type": "application",
                "bom-ref": main.reference(),
                "name": "muser",
                "version": version,
                "purl": main.reference(),
                "licenses": [{"expression": main.licence}],
                "properties": [{"name": "muser:target", "value": target.triple}],
            },
        },
        "components": components,
        "dependencies": dependencies,
    });
    let mut bytes = serde_json::to_vec_pretty(&document)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn component(package: &Package) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": package.reference(),
        "name": package.name,
        "version": package.version,
        "licenses": [{"expression": package.licence}],
        "purl": package.reference(),
    });
    if let Some(hash) = &package.sha256 {
        component["hashes"] = json!([{"alg": "SHA-256", "content": hash}]);
    }
    component
}

/// Seconds since 1970 as `YYYY-MM-DDTHH:MM:SSZ`.
pub(crate) fn timestamp(seconds: u64) -> String {
    let (year, month, day) = date(seconds);
    let rest = seconds % 86_400;
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

/// Year, month and day, counted in years that begin in March, so that leap days come last.
pub(crate) fn date(seconds: u64) -> (u64, u64, u64) {
    let days = seconds / 86_400 + 719_468;
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (era * 400 + year_of_era + u64::from(month <= 2), month, day)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::dist::options::TARGETS;

    #[test]
    fn days_are_counted() {
        assert_eq!(timestamp(0), "1970-01-01T00:00:00Z");
        assert_eq!(timestamp(951_827_696), "2000-02-29T12:34:56Z");
        assert_eq!(timestamp(1_700_000_000), "2023-11-14T22:13:20Z");
        assert_eq!(timestamp(4_107_542_399), "2100-02-28T23:59:59Z");
        assert_eq!(timestamp(4_107_542_400), "2100-03-01T00:00:00Z");
    }

    #[test]
    fn every_reference_has_its_component() {
        let package = |name: &str, ours, needs: &[&str]| Package {
            name: name.to_owned(),
            version: "1.0.0".to_owned(),
            authors: String::new(),
            licence: "MIT".to_owned(),
            folder: std::path::PathBuf::new(),
            ours,
            sha256: (!ours).then(|| "ab".repeat(32)),
            needs: needs.iter().map(|name| format!("pkg:cargo/{name}@1.0.0")).collect::<BTreeSet<_>>(),
        };
        let list =
            [package("a", false, &[]), package("muser", true, &["a", "own"]), package("own", true, &["a"])];
        let make = || document(&crate::root(), "1.0.0", &TARGETS[0], 0, &list).expect("a document");
        assert_eq!(make(), make());
        let document: Value = serde_json::from_slice(&make()).expect("JSON");
        let main = &document["metadata"]["component"];
        let components = document["components"].as_array().expect("components");
        let known: BTreeSet<&str> =
            components.iter().chain([main]).filter_map(|component| component["bom-ref"].as_str()).collect();
        assert_eq!(known.len(), 3 + WEIGHTS.len());
        for entry in document["dependencies"].as_array().expect("dependencies") {
            assert!(known.contains(entry["ref"].as_str().expect("a name")));
            for need in entry["dependsOn"].as_array().expect("a list") {
                assert!(known.contains(need.as_str().expect("a name")), "{need}");
            }
        }
        assert_eq!(components[0]["hashes"][0]["content"], "ab".repeat(32));
    }
}
