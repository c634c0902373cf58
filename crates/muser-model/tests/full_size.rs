//! A file of the released size opens at once: nothing in it is read but the header.
//!
//! The data of the file is a hole, so it takes 20 MB of disk. Files with holes are made on every usual file system.

use std::fs::File;
use std::io::Write;
use std::time::{Duration, Instant};

use muser_gguf::{GgmlType, GgufFile};
use muser_model::synth::{self, Mix, Preset, SynthOptions};
use muser_model::{Geometry, Model};

#[test]
fn the_released_size_opens_at_once() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("hollow.gguf");
    let options = SynthOptions::new(Preset::B30, Mix::Medium(GgmlType::Q4_K));
    let header = synth::header(&options).expect("possible");
    let mut file = File::create(&path).expect("created");
    file.write_all(header.bytes()).expect("written");
    file.set_len(header.file_len()).expect("a hole");
    drop(file);

    let mut best = Duration::MAX;
    for _ in 0..3 {
        let start = Instant::now();
        let file = GgufFile::open(&path).expect("valid");
        best = best.min(start.elapsed());
        assert_eq!(file.tensors().len(), 731);
    }
    // Measured: 2 to 8 ms. The bound leaves room for slow and busy machines, not for reading the data.
    assert!(best < Duration::from_millis(300), "opening took {best:?}");

    let model = Model::load(&path).expect("fits");
    assert_eq!(model.geometry, Geometry::released());
    assert_eq!(model.geometry.known_name(), Some("Muse Glimmer 30B"));
    assert_eq!(model.output.ty, GgmlType::Q5_K);
    assert_eq!(model.file.tensors().iter().map(|tensor| tensor.len as u64).sum::<u64>(), 16_743_567_360);
    let tokens = model.file.strings("tokenizer.ggml.tokens").expect("text");
    assert_eq!((tokens.len(), tokens[200_008]), (202_048, "<|eot|>"));
}
