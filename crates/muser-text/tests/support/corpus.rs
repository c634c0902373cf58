//! A deterministic corpus of over a megabyte in many scripts, generated so that the repository stays small.
//!
//! Sentences of each script are repeated in random order with random damage: changed case, doubled and dropped
//! characters, odd blanks, digits, marks and symbols in between. The damage matters more than the sentences: it makes
//! pieces that no vocabulary has as a whole.

use muser_testkit::Rng;

/// One part of the corpus.
pub(crate) struct Section {
    /// Name for reports.
    pub(crate) name: &'static str,
    /// Its text.
    pub(crate) text: String,
}

const SAMPLES: [(&str, &[&str]); 15] = [
    (
        "english",
        &[
            "The harbour was quiet when the first boats came home with the morning tide. ",
            "\"You can't be serious,\" she said; but we'd already seen that they weren't going to wait. ",
            "In 1987 about 12,450 people lived here, and by 2024 it was 98.6% more. ",
            "Unbelievably, the half-finished manuscript re-emerged in O'Brien's attic.\n\n",
        ],
    ),
    (
        "german",
        &[
            "Die Straßenbahnhaltestelle liegt übrigens gleich hinter der Bäckerei an der Ecke. ",
            "Donaudampfschifffahrtsgesellschaften gäbe es heute wohl kaum noch, meinte er. ",
            "Größe, Maß und Fuß: drei Wörter mit ß!\n",
        ],
    ),
    (
        "romance",
        &[
            "L'été dernier, nous avons traversé la forêt jusqu'à l'étang où naissent les rivières. ",
            "¿Quién dijo que mañana no habría corazón para la canción del niño? ",
            "A manhã começou com pão quente, café e uma conversa às pressas. ",
        ],
    ),
    (
        "russian",
        &[
            "Вечером над рекой поднялся густой туман, и лодки вернулись раньше обычного. ",
            "Объявление гласило: «Вход воспрещён», — но ёжик всё равно вошёл. ",
        ],
    ),
    ("greek", &["Το καράβι έφυγε από το λιμάνι πριν ξημερώσει. ", "Γειά σου, Κόσμε! Πώς είσαι σήμερα; "]),
    (
        "chinese",
        &[
            "清晨的港口很安静，第一批渔船随着潮水回来了。",
            "我们在二〇二四年搬到了这座城市，人口约有一千二百万。",
            "“你是认真的吗？”她问，“他们不会等的！”\n",
        ],
    ),
    (
        "japanese",
        &[
            "朝の港は静かで、最初の船が潮とともに帰ってきた。",
            "カタカナとひらがなと漢字が混ざったＡＢＣ文章です。",
        ],
    ),
    (
        "korean",
        &[
            "아침 항구는 조용했고 첫 배들이 밀물과 함께 돌아왔다. ",
            "우리는 내일 도서관에서 만나기로 약속했습니다. ",
        ],
    ),
    (
        "arabic",
        &["كان الميناء هادئا عندما عادت القوارب الأولى مع المد. ", "بِسْمِ اللَّهِ كَتَبَ الطَّالِبُ الدَّرْسَ فِي الصَّفِّ. "],
    ),
    ("hebrew", &["הנמל היה שקט כשהסירות הראשונות חזרו עם הגאות. ", "שָׁלוֹם עוֹלָם, מַה שְּׁלוֹמְךָ הַיּוֹם? "]),
    ("hindi", &["सुबह बंदरगाह शांत था जब पहली नावें ज्वार के साथ लौटीं। ", "क्या आप कल पुस्तकालय में मिलेंगे? नमस्ते! "]),
    ("thai", &["ท่าเรือเงียบสงบเมื่อเรือลำแรกกลับมาพร้อมกับน้ำขึ้น ", "พรุ่งนี้เราจะพบกันที่ห้องสมุดใช่ไหม "]),
    ("tamil", &["காலையில் துறைமுகம் அமைதியாக இருந்தது. ", "நாளை நூலகத்தில் சந்திப்போம்! "]),
    (
        "emoji",
        &[
            "👩‍👩‍👧‍👦 went 🏃🏽‍♀️ to the 🏖️ on day ①②③ ½ of ⅷ… ",
            "e\u{301}a\u{308}\u{304} ﬁ ǅ ŉ İ ſ K Å \u{200b}\u{feff} ☃️ ∑∫≠ → \u{1f1e9}\u{1f1ea} ",
        ],
    ),
    (
        "code",
        &[
            "fn main() {\n    let total: u64 = (0..10_000).filter(|n| n % 3 == 0).sum();\n    println!(\"{total:>8}\");\n}\n",
            "\tfor (int i = 0; i < argc; ++i) { /* don't */ buf[i] ^= 0xFF; }  // x'LL\r\n",
            "SELECT id, COUNT(*) AS n FROM users_2024 WHERE name LIKE '%O''Brien%' GROUP BY id;\n",
            "{\"key\": [1, 2.5e-3, null], \"path\": \"C:\\\\temp\\\\x\", \"url\": \"https://example.org/a/b?c=d&e=%20\"}\n",
            "<div class=\"a-b\">\n\n\n        <p>&nbsp;</p>    </div>\n",
        ],
    ),
];

const SPICE: [&str; 24] = [
    " ", "  ", "\n", "\r\n", "\n \n", "\t", "\u{3000}", "\u{a0}", "'s", "'T", "'re", "'", "...", "!?", "#",
    "/", "//\n", "7", "1234", "\u{301}", "\u{fe0f}", "_", "ª", "你",
];

/// All sections: one for each script, and one with all of them mixed.
pub(crate) fn sections() -> Vec<Section> {
    let mut random = Rng(0x6d75_7365);
    let mut sections: Vec<Section> = SAMPLES
        .iter()
        .map(|(name, sentences)| Section { name, text: section(sentences, 80_000, &mut random) })
        .collect();
    let all: Vec<&str> = SAMPLES.iter().flat_map(|(_, sentences)| sentences.iter().copied()).collect();
    sections.push(Section { name: "mixed", text: section(&all, 200_000, &mut random) });
    sections
}

fn section(sentences: &[&str], len_bytes: usize, random: &mut Rng) -> String {
    let mut out = String::with_capacity(len_bytes + 1000);
    while out.len() < len_bytes {
        let sentence = sentences[random.below(sentences.len())];
        // A third stays whole, a third is damaged a little, a third a lot.
        let damage = [0, 30, 4][random.below(3)];
        for c in sentence.chars() {
            if damage == 0 || random.below(damage) > 0 {
                out.push(c);
                continue;
            }
            match random.below(6) {
                0 => out.extend(c.to_uppercase()),
                1 => out.extend(c.to_lowercase()),
                2 => out.extend([c, c]),
                3 => {}
                4 => out.extend(std::iter::repeat_n(c, random.below(20))),
                _ => {
                    out.push(c);
                    out.push_str(SPICE[random.below(SPICE.len())]);
                }
            }
        }
    }
    out
}
