use super::{Scratch, encode_piece, merge_by_heap, merge_by_scan};
use crate::test_support::tiny_tokenizer;
use proptest::prelude::*;
use std::time::{Duration, Instant};

fn both(piece: &[u8]) -> (Vec<u32>, Vec<u32>) {
    let vocabulary = tiny_tokenizer().vocabulary();
    let (mut by_scan, mut by_heap) = (Vec::new(), Vec::new());
    let mut scratch = Scratch::default();
    merge_by_scan(vocabulary, piece, &mut scratch.symbols, &mut by_scan);
    merge_by_heap(vocabulary, piece, &mut scratch, &mut by_heap);
    (by_scan, by_heap)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn scan_and_heap_agree(piece in proptest::collection::vec(proptest::sample::select(b"aeinst h\xe4\xbd\xa0".to_vec()), 1..200)) {
        let (by_scan, by_heap) = both(&piece);
        prop_assert_eq!(by_scan, by_heap);
    }

    #[test]
    fn bytes_survive(piece in proptest::collection::vec(any::<u8>(), 1..100)) {
        let tokenizer = tiny_tokenizer();
        let mut ids = Vec::new();
        encode_piece(tokenizer.vocabulary(), &piece, &mut Scratch::default(), &mut ids);
        let back: Vec<u8> = ids.iter().flat_map(|&id| tokenizer.token_bytes(id).unwrap_or_default()).copied().collect();
        prop_assert_eq!(back, piece);
    }
}

#[test]
fn no_mergeable_pair_is_left() {
    let vocabulary = tiny_tokenizer().vocabulary();
    let (ids, _) = both("the quick brown fox was there with the others".as_bytes());
    assert!(ids.windows(2).all(|pair| vocabulary.merges.get(pair[0], pair[1]).is_none()));
}

#[test]
fn a_million_equal_characters_take_a_moment() {
    for text in ["^", "a", ".", " ", "你", "A", "\u{301}", "\n", "1", "ª", "\u{3000}"] {
        let tokenizer = tiny_tokenizer();
        let long = text.repeat(1_000_000);
        let start = Instant::now();
        let ids = tokenizer.encode(&long, crate::Specials::Plain);
        // The bound is far above what it takes (tens of milliseconds) and far below what quadratic work would take.
        assert!(start.elapsed() < Duration::from_secs(10), "{text:?}: {:?}", start.elapsed());
        let bytes: usize = ids.iter().map(|&id| tokenizer.token_bytes(id).unwrap_or_default().len()).sum();
        assert_eq!(bytes, long.len(), "{text:?}");
    }
}
