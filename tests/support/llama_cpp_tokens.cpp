// Asks llama.cpp's tokenizer: what words it cuts texts into, and what tokens it gives.
//
//     llama_cpp_tokens FILE.gguf < TEXTS > ANSWERS
//
// A line of TEXTS is a text in hexadecimal digits; its answer is a line of words in such digits, a tab, and the tokens' ids.
// The words are not in llama.cpp's interface, so that its source is included; make_llama_cpp_tokens.py tells how this is built.

#include "llama-vocab.cpp"

#include <cstdio>
#include <iostream>

int main(int, char ** arguments) {
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level >= GGML_LOG_LEVEL_ERROR) {
            fputs(text, stderr);
        }
    }, nullptr);
    llama_backend_init();
    llama_model_params params = llama_model_default_params();
    params.vocab_only = true;
    const llama_model * model = llama_model_load_from_file(arguments[1], params);
    if (model == nullptr) {
        return 1;
    }
    const llama_vocab & vocab = *llama_model_get_vocab(model);
    std::vector<std::string> patterns;
    if (vocab.get_type() == LLAMA_VOCAB_TYPE_BPE) {
        patterns = llm_tokenizer_bpe(vocab).regex_exprs;
    }
    for (std::string line; std::getline(std::cin, line);) {
        std::string text;
        for (size_t i = 0; i + 1 < line.size(); i += 2) {
            text.push_back((char) std::stoi(line.substr(i, 2), nullptr, 16));
        }
        const char * between = "";
        for (const std::string & word : unicode_regex_split(text, patterns, false)) {
            if (patterns.empty() || word.empty()) {
                continue;
            }
            printf("%s", between);
            between = " ";
            for (const unsigned char byte : word) {
                printf("%02x", byte);
            }
        }
        between = "\t";
        for (const llama_token id : vocab.tokenize(text, true, true)) {
            printf("%s%d", between, id);
            between = " ";
        }
        printf("\n");
    }
}
